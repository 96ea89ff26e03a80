"""Names of the parts of a split model: `PREFIX-00002-of-00005.gguf`."""

import re
from pathlib import Path
from typing import NamedTuple

_PATTERN = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class SplitName(NamedTuple):
    prefix: str  # file name without the suffix
    index: int  # from 0
    count: int


def split_name(path: Path) -> SplitName | None:
    """The parts of a split file's name; None for any other name."""
    match = _PATTERN.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return SplitName(match["prefix"], int(match["number"]) - 1, int(match["count"]))


def shard_path(prefix: Path, index: int, count: int) -> Path:
    """Path of part `index` (from 0) of `count`. `prefix` is the path without the suffix."""
    return prefix.with_name(f"{prefix.name}-{index + 1:05d}-of-{count:05d}.gguf")
