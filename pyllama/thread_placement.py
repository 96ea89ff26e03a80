"""Which processors the engine's threads may use: `--cpu-mask`, `--cpu-range`, `--cpu-strict`, `--numa`.

The result is the engine's `thread_cpus`: processors of thread i, taken modulo the length; empty leaves them free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.options import Options

NODES = Path("/sys/devices/system/node")


def parse_mask(text: str) -> set[int]:
    """Processors of a hexadecimal mask; bit 0 is processor 0. Raises `InvalidArgument`."""
    digits = text.removeprefix("0x").removeprefix("0X")
    if not re.fullmatch(r"[0-9a-fA-F]{1,256}", digits):
        raise InvalidArgument(f"the CPU mask '{text}' is not a hexadecimal number")
    mask = int(digits, 16)
    return {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}


def parse_range(text: str) -> set[int]:
    """Processors of `lo-hi`, both included; either may be left out. Raises `InvalidArgument`."""
    match = re.fullmatch(r"(\d{0,4})-(\d{0,4})", text)
    if match is None:
        raise InvalidArgument(f"the CPU range '{text}' is not of the form lo-hi")
    first, last = int(match[1] or 0), int(match[2] or max(os.sched_getaffinity(0)))
    if first > last:
        raise InvalidArgument(f"the CPU range '{text}' is empty")
    return set(range(first, last + 1))


def numa_nodes(nodes: Path = NODES) -> list[set[int]]:
    """Processors of each NUMA node that this process may use; one node where the system does not tell."""
    allowed = os.sched_getaffinity(0)
    found = []
    for path in sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        cpus: set[int] = set()
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            if first:
                cpus |= set(range(int(first), int(last or first) + 1))
        if cpus & allowed:
            found.append(cpus & allowed)
    return found or [allowed]


def engine_thread_options(options: Options) -> dict[str, Any]:
    """The engine's keyword arguments for a program's options. Raises `InvalidArgument`."""
    cpus = thread_cpus(
        mask=options.cpu_mask, cpu_range=options.cpu_range, strict=bool(options.cpu_strict), numa=options.numa
    )
    return {"thread_cpus": cpus, "thread_priority": options.prio, "thread_poll": options.poll}


def thread_cpus(
    *, mask: str = "", cpu_range: str = "", strict: bool = False, numa: str | None = None, nodes: Path = NODES
) -> Sequence[Sequence[int]]:
    """`mask` and `cpu_range` add up. strict: one processor per thread. numa: ``distribute`` deals threads out to the
    nodes in turn, ``isolate`` keeps them on the node this thread runs on, ``numactl`` on what the process was given.

    Raises `InvalidArgument` for text that cannot be read and for processors this process may not use.
    """
    allowed = os.sched_getaffinity(0)
    chosen = (parse_mask(mask) if mask else set()) | (parse_range(cpu_range) if cpu_range else set())
    if missing := chosen - allowed:
        raise InvalidArgument(f"processor {min(missing)} is not one that this process may use")
    groups = [chosen] if chosen else []
    if numa == "distribute":
        groups = [node & (chosen or node) for node in numa_nodes(nodes)]
    elif numa == "isolate":
        here = _current_cpu()
        groups = [next(node for node in numa_nodes(nodes) if here in node) & (chosen or allowed)]
    elif numa == "numactl" and not chosen:
        groups = [allowed]
    groups = [group for group in groups if group]
    if strict:
        return [[cpu] for cpu in _interleaved(groups or [allowed])]
    return [sorted(group) for group in groups]


def _interleaved(groups: Sequence[set[int]]) -> list[int]:
    """First processor of every group, then the second of every group, ..."""
    columns = [sorted(group) for group in groups]
    return [column[i] for i in range(max(map(len, columns))) for column in columns if i < len(column)]


def _current_cpu() -> int:
    """Processor this thread runs on (field 39 of its `stat`)."""
    text = Path("/proc/thread-self/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[36])
