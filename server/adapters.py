"""The server's LoRA adapters: what it knows of them, and the scales that requests start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyllama.server.errors import InvalidRequest
from pyllama.server.generation_params import single_precision
from pyllama.server.request_fields import FLOAT_MAX, wrong_type

Scales = tuple[float, ...]
"""One for each adapter, in the order of their ids, in single precision."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    path: str
    task_name: str = ""
    prompt_prefix: str = ""


class Adapters:
    """Belongs to the event loop's thread."""

    def __init__(self, facts: Sequence[AdapterFacts] = (), scales: Sequence[float] = ()) -> None:
        self.facts = tuple(facts)
        self._scales = [single_precision(scale) for scale in scales]

    def scales_of(self, value: Any) -> Scales:
        """Of a request whose field `lora` is `value`; None: the server's. Raises `InvalidRequest`."""
        scales = self._scales if value is None else self._read(value)
        return tuple(scales)

    def set_scales(self, value: Any) -> None:
        """Of requests that do not bring their own. Raises `InvalidRequest`."""
        self._scales = self._read(value)

    def _read(self, value: Any) -> list[float]:
        """`[{id, scale}]`; adapters that are not listed get 0."""
        if not isinstance(value, list):
            raise wrong_type("lora", "array", value)
        scales = [0.0] * len(self.facts)
        for entry in value:
            if not isinstance(entry, dict):
                raise wrong_type("lora[]", "object", entry)
            adapter, scale = entry.get("id", -1), entry.get("scale", 0.0)
            if isinstance(adapter, bool) or not isinstance(adapter, int) or not 0 <= adapter < len(scales):
                known = f"0 to {len(scales) - 1} are loaded" if scales else "no adapter is loaded"
                raise InvalidRequest(f"invalid adapter id {str(adapter)[:40]}: {known}")
            if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= FLOAT_MAX:
                raise InvalidRequest(f"the scale of adapter {adapter} must be a finite number")
            scales[adapter] = single_precision(scale) + 0.0  # -0 is 0
        return scales

    def list_json(self) -> list[dict[str, Any]]:
        return [
            {
                "id": index,
                "path": facts.path,
                "scale": scale,
                "task_name": facts.task_name,
                "prompt_prefix": facts.prompt_prefix,
            }
            for index, (facts, scale) in enumerate(zip(self.facts, self._scales, strict=True))
        ]
