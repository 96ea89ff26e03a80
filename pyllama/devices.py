"""The devices of this machine that models can lie on, with their memory."""

from __future__ import annotations

from dataclasses import dataclass

from pyllama.host_memory import available_bytes, physical_bytes

HOST = "CPU"


@dataclass(frozen=True, slots=True)
class Device:
    """`name`: as `--device` spells it. Bytes; free: what can be allocated now."""

    name: str
    total: int
    free: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpus`: those that can be used; `problem`: why there is none, one line."""

    host: Device
    gpus: tuple[Device, ...] = ()
    problem: str = ""

    def find(self, name: str) -> Device | None:
        """None for names that stand for no memory of their own: `CPU0` and the like are shares of the host."""
        return next((device for device in (self.host, *self.gpus) if device.name == name), None)


def this_machine(*, with_gpus: bool = True) -> Machine:
    """What is free now. with_gpus: look at them, which makes a context on each; some hundred milliseconds."""
    host = Device(HOST, physical_bytes(), available_bytes())
    if not with_gpus:
        return Machine(host)
    from pyllama._engine import backend_info, cuda_status

    usable = {name for name in backend_info()["devices"] if not is_host(name)}
    status = cuda_status()
    gpus, problems = [], []
    for device in status["devices"]:
        if device["device"] in usable and not device["problem"] and device["total_bytes"] > 0:
            gpus.append(Device(device["device"], device["total_bytes"], device["free_bytes"], device["name"]))
        elif device["problem"]:
            problems.append(f"{device['device']}: {device['problem']}")
    problem = ""
    if not gpus:
        problem = status["driver"] if not status["has_driver"] else "; ".join(problems) or status["kernels"]
    return Machine(host, tuple(gpus), problem)


def is_host(name: str) -> bool:
    """`CPU`, or `CPU0` and so on: ranks on the processors of the host."""
    return name.startswith(HOST)
