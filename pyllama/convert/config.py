"""`config.json` of a checkpoint: typed access, with errors that name the key."""

import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from pyllama.errors import ModelError

from .json_files import read_json


class Config:
    """The keys of a model's configuration. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: Path | str = "config.json") -> None:
        self._values = values
        self.source = source

    @classmethod
    def read(cls, folder: Path) -> "Config":
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing: {folder} is not a folder of a model as transformers saves it")
        return cls(read_json(path), path)

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def keys(self) -> Set[str]:
        return self._values.keys()

    def integer(self, key: str, default: int | None = None) -> int:
        """A size or count, at least 1."""
        value = self._or_default(key, default)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.fault(key, value, "a positive integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """As `integer`, but there may be none."""
        return 0 if self._or_default(key, default) == 0 else self.integer(key, default)

    def integers(self, key: str, default: Sequence[int]) -> list[int]:
        """A list of numbers that are at least 0."""
        value = self._or_default(key, default)
        if not isinstance(value, (list, tuple)) or any(
            type(item) is not int or not 0 <= item < 1 << 31 for item in value
        ):
            raise self.fault(key, value, "a list of numbers of at least 0")
        return list(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fault(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._or_default(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, value, "true or false")
        return value

    def section(self, key: str) -> "Config":
        """A nested object; empty where it is absent."""
        value = self._or_default(key, {})
        if not isinstance(value, dict):
            raise self.fault(key, value, "an object")
        return Config(value, f"{self.source}: {key}")

    def text_part(self, defaults: Mapping[str, Any]) -> "Config":
        """For a multimodal model what `text_config` says, and what stands beside it where that says nothing.

        defaults: for what neither says.
        """
        return self.with_section("text_config", defaults)

    def with_section(self, key: str, defaults: Mapping[str, Any] | None = None) -> "Config":
        """What a nested object says, and what stands beside it where that says nothing; defaults: for the rest."""
        merged = dict(defaults or {})
        for values in (self._values, self.section(key)._values):
            merged |= {key: value for key, value in values.items() if value is not None}
        return Config(merged, self.source)

    def require(self, key: str, expected: Any, default: Any) -> None:
        """Refuse a setting whose other values change the arithmetic in ways that the family's GGUF form cannot say."""
        value = self._or_default(key, default)
        if value != expected:
            raise self.fault(key, value, f"{expected!r}: nothing else can be converted")

    def fault(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.source}: {key} is {value!r}, expected {expected}")

    def _or_default(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.source}: {key} is missing")
            return default
        return value
