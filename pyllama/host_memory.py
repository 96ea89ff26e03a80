"""How much host memory a cache may take: what is free, and what the process's control group allows."""

from __future__ import annotations

import os
from pathlib import Path

MEBIBYTE = 1 << 20

MOST_CACHE_BYTES = 8192 * MEBIBYTE
"""The default cache takes no more than this, however much memory there is."""

# Version 1 of control groups writes "no limit" as a number near 2^63.
_NO_LIMIT = 1 << 60


def default_cache_bytes() -> int:
    """Budget of a cache that nobody sized: 8 GiB, or a quarter of the memory to be had where that is less."""
    return min(MOST_CACHE_BYTES, available_bytes() // 4)


def cache_budget(mebibytes: int | None) -> int:
    """Bytes for a size in MiB; -1 for a negative one: no limit. None: `default_cache_bytes`."""
    if mebibytes is None:
        return default_cache_bytes()
    return mebibytes * MEBIBYTE if mebibytes >= 0 else -1


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be used without swapping (all of it where the system does not say), within the group's limit."""
    limits = [*_group_limits(proc / "self/cgroup", groups)]
    available = _bytes_in(proc / "meminfo", "MemAvailable")
    return min([_installed_bytes() if available is None else available, *limits])


def physical_bytes(proc: Path = Path("/proc")) -> int:
    """All memory that the system has."""
    total = _bytes_in(proc / "meminfo", "MemTotal")
    return _installed_bytes() if total is None else total


def _installed_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes_in(meminfo: Path, field: str) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _group_limits(membership: Path, groups: Path) -> list[int]:
    """Limits of the process's groups and of all groups around them. A path that is not visible from here is skipped."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits: list[int] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root, names = groups, ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes",)
        else:
            continue
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limits += [limit for name in names if (limit := _limit_in(place / name)) is not None]
            if place == root:
                break
    return limits


def _limit_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    limit = int(text) if text.isdigit() else _NO_LIMIT
    return limit if limit < _NO_LIMIT else None
