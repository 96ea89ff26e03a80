"""Facts about this machine's processor that llama-bench prints or takes as a default."""

import functools
import os
import platform
from pathlib import Path


@functools.cache
def cpu_name() -> str:
    """Marketing name of the processor, e.g. `AMD EPYC 9654`; the architecture where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for key in ("model name", "cpu", "Model"):
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def physical_cores() -> int:
    """Cores this process may use, counting hardware threads of one core once."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings")
        try:
            cores.add(topology.read_text(encoding="ascii").strip())
        except OSError:
            return len(allowed)
    return len(cores)
