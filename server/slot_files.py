"""Files of `POST /slots/{id}`: the tokens and the state of one slot, with what they were computed by.

    b"V100SLOT", u32 version, u32 bytes of the JSON that follows, JSON, i32 tokens, state, xxh3-128 of all before

The JSON holds `n_tokens` and `computed_by`. The state carries its own mark of model, quantisation and KV types.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pyllama.errors import PyllamaError

MAGIC = b"V100SLOT"
VERSION = 2  # 2: states bring their checkpoints along
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 16
_PLAIN_NAME = re.compile(r"[^\x00-\x1f\x7f/\\:*?\"<>|\ud800-\udfff]+")


class SlotFileError(PyllamaError):
    """The file cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class SlotFile:
    """computed_by: build and options that the numbers in `state` depend on beside the model."""

    tokens: list[int]
    state: bytes
    computed_by: Mapping[str, Any]

    def parts(self) -> Iterator[bytes]:
        """What the file holds, piece by piece."""
        header = json.dumps({"n_tokens": len(self.tokens), "computed_by": dict(self.computed_by)}).encode()
        digest = xxhash.xxh3_128()
        tokens = np.asarray(self.tokens, "<i4").tobytes()
        for part in (_PREFIX.pack(MAGIC, VERSION, len(header)), header, tokens, self.state):
            digest.update(part)
            yield part
        yield digest.digest()


def decoded(data: bytes, computed_by: Mapping[str, Any]) -> SlotFile:
    """Raises `SlotFileError` for a file that is damaged, or not computed by what `computed_by` says."""
    if len(data) < _PREFIX.size + _DIGEST_BYTES or not data.startswith(MAGIC):
        raise SlotFileError("invalid file: it is not a slot file")
    _, version, n_header = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise SlotFileError(f"the file has version {version}, this server reads {VERSION}")
    content = memoryview(data)[:-_DIGEST_BYTES]
    if xxhash.xxh3_128_digest(content) != data[-_DIGEST_BYTES:]:
        raise SlotFileError("invalid file: it is truncated or damaged")
    end = _PREFIX.size + n_header
    try:
        header = json.loads(bytes(content[_PREFIX.size : end]))
        n_tokens, found = header["n_tokens"], header["computed_by"]
        start_of_state = end + 4 * n_tokens
        tokens = np.frombuffer(content[end:start_of_state], "<i4", n_tokens).tolist()
        differing = [key for key in computed_by if found.get(key) != computed_by[key]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlotFileError(f"invalid file: {error}") from None
    if differing:
        key = differing[0]
        raise SlotFileError(f"the file was saved with another {key}: {found.get(key)}, here {computed_by[key]}")
    return SlotFile(tokens, bytes(content[start_of_state:]), found)


def is_plain_name(name: object) -> bool:
    """A name that stays in its folder on every system: no separators, no control characters, no dot at an end."""
    if not isinstance(name, str) or name != name.strip(" .") or not _PLAIN_NAME.fullmatch(name):
        return False
    return len(name.encode()) <= 255


def read_file(path: Path) -> bytes:
    """The bytes of a regular file. Links are not followed, so nothing outside the folder is read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SlotFileError("it is not a regular file")
        return file.read()


def write_file(path: Path, parts: Iterable[bytes]) -> int:
    """The bytes written. Under a temporary name first: a reader sees the old file or the new one, never a part.

    Readable by this user only, as a slot holds what somebody wrote. Replaces a link, never follows it.
    """
    descriptor, name = tempfile.mkstemp(prefix=".slot-", dir=path.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "wb") as file:
            n_bytes = sum(map(file.write, parts))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return n_bytes
