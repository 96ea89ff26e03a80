"""Reads `tokenizer.model` of SentencePiece: a protocol-buffers message of pieces, trainer and normaliser settings."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pyllama.errors import TokenizerError

# Fields of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec that matter here.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BPE = 3, 2
_SPECIAL_IDS = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}
_ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 3, 4

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


class Piece(NamedTuple):
    text: bytes
    score: float
    type: int  # numbered as GGUF token types are


class SentencePieceModel(NamedTuple):
    pieces: list[Piece]
    special: dict[str, int]  # ids by name; a token the model lacks is left out
    add_space_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises `TokenizerError` for a file that is cut off or is not a BPE model."""
    try:
        return _read_model(path.read_bytes())
    except _Malformed as error:
        raise TokenizerError(f"{path}: not a SentencePiece model: {error}") from None


class _Malformed(Exception):
    pass


def _read_model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    special = {"unk": 0, "bos": 1, "eos": 2}
    model_type, prefix, squeeze = 1, True, True
    for field, value in _fields(data):
        if field == _PIECES:
            pieces.append(_read_piece(_message(value)))
        elif field == _TRAINER:
            for key, setting in _fields(_message(value)):
                if key == _MODEL_TYPE:
                    model_type = _number(setting)
                elif key in _SPECIAL_IDS:
                    special[_SPECIAL_IDS[key]] = _number(setting)
        elif field == _NORMALIZER:
            for key, setting in _fields(_message(value)):
                if key == _ADD_DUMMY_PREFIX:
                    prefix = bool(_number(setting))
                elif key == _REMOVE_EXTRA_WHITESPACES:
                    squeeze = bool(_number(setting))
    if not pieces:
        raise _Malformed("it holds no pieces")
    if model_type != _BPE:
        raise _Malformed(f"its pieces are of model type {model_type}; only byte-pair encoding (2) can be converted")
    # Negative ids, which mean "none", are stored as 64-bit numbers and so lie beyond any vocabulary.
    special = {name: token for name, token in special.items() if token < len(pieces)}
    return SentencePieceModel(pieces, special, prefix, squeeze)


def _read_piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, 1
    for field, value in _fields(data):
        if field == _TEXT:
            text = _message(value)
        elif field == _SCORE:
            if not isinstance(value, float):
                raise _Malformed("a score is not a float")
            score = value
        elif field == _TYPE:
            kind = _number(value)
    return Piece(text, score, kind)


def _message(value: "bytes | int | float") -> bytes:
    if not isinstance(value, bytes):
        raise _Malformed("a number stands where a message or text belongs")
    return value


def _number(value: "bytes | int | float") -> int:
    if not isinstance(value, int):
        raise _Malformed("something else stands where a number belongs")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, "bytes | int | float"]]:
    """(field number, value) of a message: varints as int, 4-byte values as float, texts and messages as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire_type == _BYTES:
            size, at = _varint(data, at)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise _Malformed(f"wire type {wire_type} at byte {at}")
        if size > len(data) - at:
            raise _Malformed(f"a field at byte {at} claims {size} bytes of {len(data) - at}")
        content = data[at : at + size]
        at += size
        yield tag >> 3, struct.unpack("<f", content)[0] if wire_type == _FIXED32 else content


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _Malformed("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Malformed(f"a number of more than 10 bytes at byte {at}")
