"""Where a draft model lies: beside the model that it drafts for, or where the user sends it (docs/placement.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyllama.devices import HOST, Machine, is_host

if TYPE_CHECKING:
    from pyllama.placement import RankNeeds


@dataclass(frozen=True, slots=True)
class DraftToPlace:
    """placement: what was asked for it, as arguments of `pyllama._engine.Model`. sizes: what
    `pyllama._engine.MemoryNeeds.of` takes of its engine, but for the context, which is the model's.
    """

    path: str
    placement: Mapping[str, Any]
    sizes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What a draft model takes of each device. memory: its `pyllama._engine.MemoryNeeds`."""

    draft: DraftToPlace
    memory: Any

    @property
    def n_layer(self) -> int:
        return int(self.memory.n_layer)

    def of(self, *, n_ctx: int, **placement: Any) -> Sequence[RankNeeds]:
        sizes = dict(self.draft.sizes)
        needs: Sequence[RankNeeds] = self.memory.of(n_ctx=n_ctx, **sizes, **placement)
        if any(need.states > 0 for need in needs):  # it cannot be cut back: it drafts in sequences of their own
            sizes["n_seq_max"] *= 2
            needs = self.memory.of(n_ctx=n_ctx, **sizes, **placement)
        return needs


@dataclass(frozen=True, slots=True)
class PlacedDraft:
    """`arguments`: of `pyllama._engine.Model`. n_gpu_layers: of n_layer + 1, as of `pyllama.placement.Placed`."""

    path: str
    arguments: dict[str, Any]
    n_layer: int
    n_gpu_layers: int
    needs: tuple[RankNeeds, ...]


def arguments_beside(asked: Mapping[str, Any], devices: Sequence[str], machine: Machine) -> dict[str, Any]:
    """Arguments of `pyllama._engine.Model` for a draft model: on the first GPU of `devices`, those of the model, unless
    it was sent elsewhere. Layers that were asked for in so many words have a GPU also where the model has none.
    """
    if "devices" in asked:
        return dict(asked)
    gpus = [name for name in devices if not is_host(name)]
    if not gpus and asked.get("device_layers"):
        gpus = [gpu.name for gpu in machine.gpus]
    return {**asked, "devices": tuple(gpus[:1])}


def looks_for_gpus(asked: Mapping[str, Any]) -> bool:
    """Whether a draft model wants a GPU wherever its model lies."""
    if "devices" in asked:
        return not all(map(is_host, asked["devices"]))
    return bool(asked.get("device_layers"))


def layers_on_gpus(arguments: Mapping[str, Any], n_layer: int) -> int:
    """Of n_layer + 1, the output matrix being one."""
    if all(map(is_host, arguments["devices"])):
        return 0
    asked = arguments.get("device_layers")
    return n_layer + 1 if asked is None else min(asked, n_layer + 1)


def placement_without_effect(asked: Mapping[str, Any], devices: Sequence[str]) -> str:
    """Says so where a drafter that is part of the model, whose `devices` these are, is wanted elsewhere; else ""."""
    where = tuple(devices) or (HOST,)
    if "devices" in asked:
        is_sent_elsewhere = not set(asked["devices"] or (HOST,)) & set(where)
    else:
        is_sent_elsewhere = all(map(is_host, where)) and looks_for_gpus(asked)
    if not is_sent_elsewhere and "tensor_overrides" not in asked:
        return ""
    return f"the drafter is part of the model and lies with it ({', '.join(where)}): where it was sent has no effect"
