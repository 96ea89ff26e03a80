"""Which models a router serves: the download cache, `--models-dir` and `--models-preset`, as one list of names."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pyllama.download.cache import gguf_paths, model_cache
from pyllama.download.selection import is_model, shards_of
from pyllama.options.sources import Assignment
from pyllama.server.router.presets import STOP_TIMEOUT, CatalogError, Preset, child_arguments, merged, read_presets

log = logging.getLogger("pyllama.server.srv")

MODEL_OPTIONS = ("model", "hf_repo", "model_url")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model that a child can serve. `arguments`: of its process, without address and name.

    file: what is loaded, if it is a local file. is_hidden: answers to its name, but is not listed.
    """

    name: str
    source: str  # "preset", "models_dir" or "cache"
    arguments: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    file: Path | None = None
    loads_on_startup: bool = False
    stop_timeout: int = STOP_TIMEOUT
    preset_text: str = ""
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class Sources:
    """Where to look. `command_line`: the options that the router passes on to every child."""

    environ: Mapping[str, str]
    models_dir: str = ""
    models_preset: str = ""
    command_line: tuple[Assignment, ...] = ()
    preset_from_hub: bool = False

    def read(self) -> dict[str, CatalogModel]:
        """The models by name. Raises `CatalogError`."""
        every, presets = Preset(), dict[str, Preset]()
        if self.models_preset:
            every, presets = read_presets(Path(self.models_preset), from_hub=self.preset_from_hub)
        cached = model_cache(self.environ).models()
        found: dict[str, CatalogModel] = {}
        for source, files in (("cache", cached), ("models_dir", self._folder_models())):
            for name, file in files.items():
                if name in found:
                    raise CatalogError(f"two models are called {name}: {found[name].file} and {file}")
                found[name] = self._model(name, source, every, file)
        for section, preset in presets.items():
            name = upper_quant(section)
            if name in found and found[name].source == "preset":
                raise CatalogError(f"{self.models_preset}: two sections are called {name}")
            found[name] = self._preset_model(name, preset, found.get(name))
            twin = _cached_twin(preset, cached)
            if preset.hides_cached_twin and twin != name and twin in found:
                found[twin] = replace(found[twin], is_hidden=True)
        _check_aliases(found.values())
        return found

    def _model(self, name: str, source: str, preset: Preset, file: Path | None) -> CatalogModel:
        arguments = child_arguments(merged([preset.assignments, self.command_line]))
        return CatalogModel(
            name,
            source,
            (*(["--model", str(file)] if file else []), *arguments),
            aliases=preset.aliases,
            file=file,
            loads_on_startup=preset.loads_on_startup,
            stop_timeout=preset.stop_timeout,
            preset_text=f"[{name}]\n{preset.text}" if source == "preset" else "",
        )

    def _preset_model(self, name: str, preset: Preset, known: CatalogModel | None) -> CatalogModel:
        """A section names its model itself, or is called like a known model or a repository."""
        if any(preset.value(dest) for dest in MODEL_OPTIONS):
            return self._model(name, "preset", preset, None)
        if known is not None:
            return self._model(name, "preset", preset, known.file)
        if name.count("/") == 1:
            model = self._model(name, "preset", preset, None)
            return replace(model, arguments=("--hf-repo", name, *model.arguments))
        raise CatalogError(
            f"{self.models_preset}: [{name}] says no model; give it model, hf-repo or model-url, or the name of a model"
        )

    def _folder_models(self) -> dict[str, Path]:
        """A file is a model; so is a folder with one, which may have shards."""
        if not self.models_dir:
            return {}
        folder = Path(self.models_dir)
        if not folder.is_dir():
            raise CatalogError(f"--models-dir: there is no directory {folder}")
        models: dict[str, Path] = {}
        for name, file in _folder_files(folder):
            if name in models:
                raise CatalogError(f"two models are called {name}: {models[name]} and {file}")
            models[name] = file
        return models


def _folder_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            firsts = [path for path in gguf_paths(entry) if is_model(path) and shards_of(path)[0] == path]
            if len(firsts) > 1:
                raise CatalogError(f"{entry}: holds {len(firsts)} models, expected one: {', '.join(firsts)}")
            for sidecar in [path for path in gguf_paths(entry) if not is_model(path)]:
                log.warning("%s is not used: neither projectors nor drafts are supported yet", entry / sidecar)
            if firsts:
                yield entry.name, entry / firsts[0]
        elif entry.is_file() and is_model(entry.name) and shards_of(entry.name)[0] == entry.name:
            stem = entry.name[: -len(".gguf")]
            yield stem.removesuffix(f"-00001-of-{len(shards_of(entry.name)):05}"), entry


def _cached_twin(preset: Preset, cached: Mapping[str, Path]) -> str:
    """The name in the cache of what a preset loads, or empty."""
    if repo := preset.value("hf_repo"):
        return upper_quant(repo)
    if path := preset.value("model"):
        return next((name for name, file in cached.items() if file.resolve() == Path(path).resolve()), "")
    return ""


def _check_aliases(models: Collection[CatalogModel]) -> None:
    owners = {model.name: model.name for model in models}
    for model in models:
        for alias in model.aliases:
            if owners.setdefault(alias, model.name) != model.name:
                raise CatalogError(f"the alias {alias} of {model.name} is taken by {owners[alias]}")


def upper_quant(name: str) -> str:
    """`user/model:q8_0` as it is listed: the quant in upper case. A file behind the colon keeps its name."""
    repo, colon, quant = name.partition(":")
    return name if quant.lower().endswith(".gguf") or "/" not in repo else f"{repo}{colon}{quant.upper()}"


def list_item(name: str) -> str:
    """One name as the only item of an option that takes a comma list."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([name])
    return text.getvalue()
