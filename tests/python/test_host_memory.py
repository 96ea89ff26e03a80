"""How much memory a cache may take: files of the system, imitated in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama import host_memory
from pyllama.host_memory import available_bytes, default_cache_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


def meminfo(available: int) -> str:
    return f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {available // 1024} kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 40 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 40 * GIB),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "max\n"}, 40 * GIB),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "max\n", "cgroup/memory.high": f"{3 * GIB}\n"}, 3 * GIB),
        # The group itself has no limit, one around it has.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/b/memory.max": "max\n",
                "cgroup/a/memory.max": f"{5 * GIB}\n",
                "cgroup/memory.max": "max\n",
            },
            5 * GIB,
        ),
        # A container sees the path of the host, but its own group as the root.
        ({"proc/self/cgroup": "0::/docker/abc\n", "cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        # Version 1, with and without a limit.
        (
            {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n", "cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
        ),
        (
            {"proc/self/cgroup": "4:memory:/\n", "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            40 * GIB,
        ),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": f"{100 * GIB}\n"}, 40 * GIB),
    ],
)
def test_the_memory_to_be_had_is_what_is_available_within_every_limit(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert available_bytes(*write(tmp_path, {"proc/meminfo": meminfo(40 * GIB), **files})) == expected


def test_where_the_system_does_not_say_it_is_all_memory(tmp_path: Path) -> None:
    assert available_bytes(*write(tmp_path, {})) > 1 << 20


@pytest.mark.parametrize(("available", "expected"), [(2 * GIB, GIB // 2), (64 * GIB, 8 * GIB)])
def test_the_default_is_a_quarter_of_it_and_at_most_8_gib(
    monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    """Known fault F7: a container of 2 GB gets 512 MiB, not 8 GiB."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
    assert default_cache_bytes() == expected


def test_this_machine_has_some() -> None:
    assert 0 < default_cache_bytes() <= 8 * GIB
