"""The `general.*` keys: who made the model, from what, under which licence, and how to sample from it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyllama.errors import InvalidArgument, ModelError
from pyllama.gguf import KeyValue

from ..json_files import read_json
from .front_matter import read_front_matter
from .naming import ModelName, folder_name, size_label, spaced

TEXT_KEYS = (
    "name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by", "size_label",
    "license", "license.name", "license.link", "url", "doi", "uuid", "repo_url", "source.url", "source.doi",
    "source.uuid", "source.repo_url",
)  # fmt: skip
LIST_KEYS = ("tags", "languages")
_SOURCE_KEYS = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")

# generation_config.json -> (key under general.sampling, type)
_SAMPLING = {
    "top_k": ("top_k", "i32"),
    "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"),
    "temperature": ("temp", "f32"),
    "repetition_penalty": ("penalty_repeat", "f32"),
}


class General:
    """Values by key without the prefix `general.`; later sources replace earlier ones."""

    def __init__(self, folder: Path, n_parameters: int | None) -> None:
        """n_parameters: None when the weights are not looked at."""
        self._folder = folder
        self._n_parameters = n_parameters
        self.values: dict[str, Any] = {}
        card = read_front_matter(folder / "README.md")
        organization, name = folder_name(folder)
        self._set_name(name)
        if organization:
            self.values["organization"] = organization
        for key in ("license", "license_name", "license_link"):
            if value := _text(card, key):
                self.values[key.replace("_", ".")] = value
        tags = _list(card, "tags")
        if (pipeline := _text(card, "pipeline_tag")) and pipeline not in tags:
            tags.append(pipeline)
        for key, found in (("tags", tags), ("languages", _list(card, "language"))):
            if found:
                self.values[key] = found
        self._sources = {
            "base_model": [_source(name) for name in _list(card, "base_model")],
            "dataset": [_source(name, "datasets/") for name in _list(card, "datasets")],
        }

    def override(self, path: Path) -> None:
        """Values of a JSON file: `general.KEY` for the keys above, `general.base_models` as a list of objects."""
        try:
            values = read_json(path)
        except ModelError as error:
            raise InvalidArgument(str(error)) from None
        for key, value in values.items():
            short = key.removeprefix("general.")
            if short in ("base_models", "datasets"):
                if not _are_sources(value):
                    names = ", ".join(_SOURCE_KEYS)
                    raise InvalidArgument(f"{path}: {key}: expected a list of objects with texts for {names}")
                self._sources[short[:-1]] = value
            elif (short in TEXT_KEYS and isinstance(value, str)) or (short in LIST_KEYS and _are_texts(value)):
                self.values[short] = value
            else:
                raise InvalidArgument(f"{path}: {key} cannot be set to {value!r:.60}")

    def rename(self, name: str) -> None:
        self._set_name(name)

    @property
    def model_name(self) -> ModelName:
        """The parts that the name of an output file is made of."""
        values = self.values
        return ModelName(*(values.get(key, "") for key in ("basename", "size_label", "finetune", "version")))

    def key_values(self, architecture: str) -> list[KeyValue]:
        return [
            KeyValue("general.architecture", "string", architecture),
            KeyValue("general.type", "string", "model"),
            *self._sampling(),
            *(KeyValue(f"general.{key}", "string", self.values[key]) for key in TEXT_KEYS if key in self.values),
            *self._source_keys(),
            *(KeyValue(f"general.{key}", "string[]", self.values[key]) for key in LIST_KEYS if key in self.values),
        ]

    def _set_name(self, name: str) -> None:
        parts = ModelName.parse(name)
        label = parts.size_label if self._n_parameters is None else size_label(self._n_parameters, parts.size_label)
        named = {"name": spaced(name), "basename": parts.basename, "size_label": label}
        named |= {"finetune": parts.finetune, "version": parts.version}
        self.values = {key: value for key, value in {**self.values, **named}.items() if value}

    def _sampling(self) -> Iterator[KeyValue]:
        path = self._folder / "generation_config.json"
        config = read_json(path) if path.is_file() else {}
        if config.get("do_sample") is False:
            return
        for name, (key, kind) in _SAMPLING.items():
            value = config.get(name)
            if type(value) is int or (kind == "f32" and isinstance(value, float)):
                yield KeyValue(f"general.sampling.{key}", kind, value)

    def _source_keys(self) -> Iterator[KeyValue]:
        for kind, sources in self._sources.items():
            if sources:
                yield KeyValue(f"general.{kind}.count", "u32", len(sources))
            for number, source in enumerate(sources):
                for key, value in source.items():
                    yield KeyValue(f"general.{kind}.{number}.{key}", "string", value)


def _text(card: Mapping[str, str | list[str]], key: str) -> str:
    value = card.get(key, "")
    return value if isinstance(value, str) else value[0]


def _list(card: Mapping[str, str | list[str]], key: str) -> list[str]:
    value = card.get(key, [])
    return [value] if isinstance(value, str) else list(value)


def _source(identifier: str, kind: str = "") -> dict[str, str]:
    """What the Hub's `organisation/name` says about a base model or data set."""
    organization, _, name = identifier.rpartition("/")
    source = {"name": spaced(name)}
    if organization and "/" not in organization:
        source |= {"organization": organization, "repo_url": f"https://huggingface.co/{kind}{identifier}"}
    return source


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _are_sources(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, dict) and all(key in _SOURCE_KEYS and isinstance(text, str) for key, text in entry.items())
        for entry in value
    )
