"""Text utilities: `/tokenize` and `/detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.generate import in_thread_if_long
from pyllama.server.errors import InvalidRequest
from pyllama.server.prompts import read_prompt
from pyllama.server.request_fields import read_flag, wrong_type
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import server_state


async def tokenize(http: Request) -> Response:
    """`content`: a string, or an array of strings and token ids."""
    body = await read_object(http)
    vocabulary = server_state(http).loaded.vocabulary
    add_special = read_flag(body.get("add_special"), "add_special", False)
    parse_special = read_flag(body.get("parse_special"), "parse_special", True)
    with_pieces = read_flag(body.get("with_pieces"), "with_pieces", False)
    content = body.get("content")
    if content is None:
        return json_response({"tokens": []})
    if not isinstance(content, (str, list)):
        raise wrong_type("content", "string or array", content)

    def read() -> list[int]:
        return read_prompt(
            content, vocabulary.tokenizer, vocabulary.n_vocab, add_special=add_special, parse_special=parse_special
        )

    tokens = await in_thread_if_long(len(await http.body()), read)
    if not with_pieces:
        return json_response({"tokens": tokens})
    return json_response(
        {"tokens": [{"id": token, "piece": _piece_json(vocabulary.special_piece(token))} for token in tokens]}
    )


def _piece_json(piece: bytes) -> str | list[int]:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(http: Request) -> Response:
    body = await read_object(http)
    vocabulary = server_state(http).loaded.vocabulary
    tokens = body.get("tokens")
    if tokens is None:
        return json_response({"content": ""})
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "array", tokens)
    for position, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest(
                f"Field 'tokens': must hold token ids, but the element at position {position} is not an integer"
            )
        if not 0 <= token < vocabulary.n_vocab:
            shown = token if abs(token) < 10**20 else "a huge number"
            raise InvalidRequest(f"Field 'tokens': {shown} is outside the vocabulary of {vocabulary.n_vocab} tokens")
    return json_response({"content": await in_thread_if_long(len(tokens), vocabulary.text, tokens)})
