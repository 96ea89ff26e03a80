"""The devices that a model can run on, as `--list-devices` prints them."""

import os

from .cpu_info import cpu_name

MIB = 1 << 20


def device_list() -> str:
    """One line per device: name, description, total and free memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page // MIB for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return f"Available devices:\n  CPU: {cpu_name()} ({total} MiB, {free} MiB free)"
