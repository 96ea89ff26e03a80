"""The server's LoRA adapters: what it knows of them, and the scales that requests start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyllama.server.errors import InvalidRequest
from pyllama.server.request_fields import FLOAT_MAX, wrong_type

Scales = tuple[float, ...]
"""One for each adapter, in the order of their ids; empty when none is applied."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    path: str
    task_name: str
    prompt_prefix: str


class Adapters:
    """`scales`: of requests that do not bring their own. The event loop's thread changes and reads them."""

    def __init__(self, facts: Sequence[AdapterFacts] = (), scales: Sequence[float] = ()) -> None:
        self.facts = tuple(facts)
        self.scales = tuple(scales)

    def read_scales(self, value: Any, name: str) -> Scales:
        """`[{id, scale}]`; adapters that are not listed get 0. Raises `InvalidRequest`. `name`: of the field."""
        if not isinstance(value, list):
            raise wrong_type(name, "array", value)
        scales = [0.0] * len(self.facts)
        for entry in value:
            if not isinstance(entry, dict):
                raise InvalidRequest(f"Field '{name}': elements must be objects with id and scale")
            adapter, scale = entry.get("id", -1), entry.get("scale", 0.0)
            if isinstance(adapter, bool) or not isinstance(adapter, int) or not 0 <= adapter < len(scales):
                known = f"0 to {len(scales) - 1}" if scales else "none"
                raise InvalidRequest(f"invalid adapter id: {adapter!r}; loaded: {known}")
            if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= FLOAT_MAX:
                raise InvalidRequest(f"Field '{name}': the scale of adapter {adapter} must be a finite number")
            scales[adapter] = float(scale)
        return tuple(scales)

    def list_json(self) -> list[dict[str, Any]]:
        return [
            {
                "id": index,
                "path": facts.path,
                "scale": scale,
                "task_name": facts.task_name,
                "prompt_prefix": facts.prompt_prefix,
            }
            for index, (facts, scale) in enumerate(zip(self.facts, self.scales, strict=True))
        ]


def scales_json(scales: Scales) -> list[dict[str, Any]]:
    """The `lora` of `generation_settings`."""
    return [{"id": index, "scale": scale} for index, scale in enumerate(scales)]
