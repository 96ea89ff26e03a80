"""The devices of this machine, as `--list-devices` prints them."""

import os
from typing import Any

from .cpu_info import cpu_name

MIB = 1 << 20


def cuda_lines(status: dict[str, Any]) -> list[str]:
    """A line per CUDA device, and one on the driver or the kernels where they are not there."""
    lines = []
    for device in status["devices"]:
        peers = ", ".join(f"CUDA{peer}" for peer in device["peers"]) or "none"
        memory = f"{device['total_bytes'] // MIB} MiB, {device['free_bytes'] // MIB} MiB free"
        facts = f"compute capability {device['capability']}, {device['multiprocessors']} SMs, {device['pci_bus_id']}"
        more = f"ECC {'on' if device['ecc'] else 'off'}, peers {peers}, driver CUDA {status['driver']}"
        problem = f"; cannot be used: {device['problem']}" if device["problem"] else ""
        lines.append(f"{device['device']}: {device['name']} ({memory}), {facts}, {more}{problem}")
    if not status["has_driver"]:
        lines.append(f"no CUDA devices: {status['driver']}")
    elif lines:
        lines.append(f"CUDA kernels: {status['kernels']}")
    return lines


def device_list() -> str:
    """One line per device: name, description, total and free memory; then what is said of CUDA."""
    from pyllama._engine import cuda_status

    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page // MIB for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    lines = [f"CPU: {cpu_name()} ({total} MiB, {free} MiB free)", *cuda_lines(cuda_status())]
    return "\n  ".join(["Available devices:", *lines])
