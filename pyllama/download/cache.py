"""Where downloaded models live. Repositories have the layout of huggingface_hub, which llama.cpp shares:

    models--USER--MODEL/blobs/SHA256                 the bytes
    models--USER--MODEL/snapshots/REVISION/PATH      a link to them
    models--USER--MODEL/refs/main                    the revision seen last

Files given by URL lie under the host and path of their URL.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .selection import checked_path, is_model, quant_of, shards_of

PRESET = "preset.ini"  # in the root of a repository that names models instead of holding one


@dataclass(frozen=True, slots=True)
class ModelCache:
    """`repositories` and `urls` are folders; they may be the same, and need not exist."""

    repositories: Path
    urls: Path

    def blob(self, repo: str, sha256: str) -> Path:
        return self._repository(repo) / "blobs" / sha256

    def snapshot(self, repo: str, revision: str) -> Path:
        return self._repository(repo) / "snapshots" / revision

    def url_target(self, url: str) -> Path:
        """Where the file of a URL belongs."""
        parts = urlsplit(url)
        path = checked_path(unquote(parts.path).strip("/"))
        host = (parts.hostname or "").replace(":", "_")
        return self.urls / (f"{host}_{parts.port}" if parts.port else host) / path

    @staticmethod
    def link(name: Path, blob: Path) -> None:
        """Make `name`, in a snapshot, stand for `blob`."""
        name.parent.mkdir(parents=True, exist_ok=True)
        temporary = name.with_name(f".{name.name}.{os.getpid()}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(blob, name.parent))
        temporary.replace(name)

    def put_preset(self, repo: str, revision: str, text: bytes) -> Path:
        """Keep a repository's `preset.ini`; the file."""
        target = self.snapshot(repo, revision) / PRESET
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{PRESET}.{os.getpid()}.new")
        temporary.write_bytes(text)
        temporary.replace(target)
        self.set_latest(repo, revision)
        return target

    def set_latest(self, repo: str, revision: str) -> None:
        reference = self._repository(repo) / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        temporary = reference.with_name(f".main.{os.getpid()}.new")
        temporary.write_text(revision, encoding="utf-8")
        temporary.replace(reference)

    def snapshots(self, repo: str) -> list[Path]:
        """The folders of `repo`, the revision seen last first."""
        reference = self._repository(repo) / "refs" / "main"
        latest = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
        folders = [path for path in self._repository(repo).glob("snapshots/*") if path.is_dir()]
        return sorted(folders, key=lambda path: (path.name == latest, path.stat().st_mtime_ns), reverse=True)

    def models(self) -> dict[str, Path]:
        """`USER/MODEL:QUANT` of each complete model of a repository, then the files of URLs; the file to load of each.

        Of several revisions the one seen last counts.
        """
        found: dict[str, Path] = {}
        for folder in sorted(self.repositories.glob("models--*--*")):
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            files: dict[str, Path] = {}
            for snapshot in self.snapshots(repo):
                for path in _complete_models(snapshot):
                    files.setdefault(_model_name(repo, path), snapshot / path)
            found.update(sorted(files.items()))
        found.update(
            (path, self.urls / path) for path in _complete_models(self.urls) if not path.startswith("models--")
        )
        return found

    def remove(self, name: str) -> None:
        """Delete a model of a repository, `USER/MODEL:QUANT`: its files, and their bytes unless another file has them.

        KeyError when there is none.
        """
        repo = name.partition(":")[0]
        files = {
            snapshot / shard
            for snapshot in self.snapshots(repo)
            for path in _complete_models(snapshot)
            if _model_name(repo, path) == name
            for shard in shards_of(path)
        }
        if not files:
            raise KeyError(name)
        blobs = {file.resolve() for file in files}
        for file in files:
            file.unlink()
        folder = self._repository(repo).resolve()
        needed = {path.resolve() for path in folder.glob("snapshots/**/*")}
        for blob in blobs - needed:
            if blob.parent == folder / "blobs":
                for path in (blob, blob.with_name(f".{blob.name}.json"), blob.with_name(f".{blob.name}.lock")):
                    path.unlink(missing_ok=True)

    def _repository(self, repo: str) -> Path:
        return self.repositories / f"models--{repo.replace('/', '--')}"


def model_cache(environ: Mapping[str, str]) -> ModelCache:
    """LLAMA_CACHE for everything; else the folders that Hugging Face's and llama.cpp's programs use."""
    if everything := environ.get("LLAMA_CACHE"):
        return ModelCache(Path(everything), Path(everything))
    base = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache")
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    home = environ.get("HF_HOME") or base / "huggingface"
    return ModelCache(Path(hub) if hub else Path(home) / "hub", base / "llama.cpp")


def gguf_paths(folder: Path) -> list[str]:
    """The GGUF files below `folder` whose bytes are there, as paths inside it."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() == ".gguf" and path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def cache_list(environ: Mapping[str, str]) -> str:
    """The text of `--cache-list`."""
    models = list(model_cache(environ).models())
    lines = [f"{number:4}. {name}" for number, name in enumerate(models, 1)]
    return "\n".join([f"number of models in cache: {len(models)}", *lines])


def _model_name(repo: str, path: str) -> str:
    return f"{repo}:{quant_of(path) or path}"


def _complete_models(folder: Path) -> list[str]:
    paths = gguf_paths(folder)
    sets = {path: shards_of(path) for path in paths if is_model(path)}
    return [path for path, shards in sets.items() if shards[0] == path and set(shards) <= set(paths)]
