"""Which files of a repository make up a model: quants by name, shards of one set, projectors. Works on paths only."""

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from pyllama.errors import DownloadError

DEFAULT_QUANT = "Q4_K_M"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*|TQ\d\w*)", re.IGNORECASE)

# Files that accompany a model: projectors, drafters, importance data.
_SIDECARS = ("mmproj", "mtp-", "eagle3-", "dspark-", "dflash-", "imatrix")


def checked_path(path: str) -> str:
    """`path` as it came from outside, when it stays inside the folder it is joined to. Raises DownloadError."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r'[\\:*?"<>|\x00-\x1f\x7f]', path):
        raise DownloadError(f"the file name {path!r} is not allowed")
    return path


def checked_repo(repo: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII) or any(part in (".", "..") for part in repo.split("/")):
        raise DownloadError(f"{repo!r} is not a repository; expected USER/MODEL")
    return repo


def shards_of(path: str) -> tuple[str, ...]:
    """All names of the set that `path` is a shard of; of a whole file, its own."""
    found = _SHARD.fullmatch(path)
    count = int(found["count"]) if found else 0
    if found is None or not 1 <= int(found["index"]) <= count:
        return (path,)
    suffix = path[-len(".gguf") :]
    return tuple(f"{found['stem']}-{index:05}-of-{count:05}{suffix}" for index in range(1, count + 1))


def quant_of(path: str) -> str:
    """The quant at the end of a file's name (`UD-Q4_K_M`), or empty."""
    stem = _stem(PurePosixPath(path).name)
    return next((match[0].upper() for match in _QUANT.finditer(stem) if match.end() == len(stem)), "")


def select_model(paths: Sequence[str], *, quant: str = "", file: str = "") -> tuple[str, ...]:
    """The files of one model, the one to load first.

    file: a path; a shard stands for its set. quant: a name like `Q8_0`. Without either: Q4_K_M, else the first model.
    Raises DownloadError when there is no such model, or a shard of it is missing.
    """
    if file:
        if file not in paths:
            raise DownloadError(f"there is no file {file}; there are: {_listed(paths)}")
        return _complete_set(file, paths)
    models = sorted({shards_of(path)[0] for path in paths if is_model(path)})
    if not models:
        raise DownloadError(f"there is no model in GGUF format; there are: {_listed(paths)}")
    matches = [path for path in models if _has_quant(path, quant or DEFAULT_QUANT)]
    if quant and not matches:
        raise DownloadError(f"there is no {quant} model; there are: {_listed(models)}")
    # Of Q4_K_M and UD-Q4_K_M, the name that was asked for; then the shorter.
    best = min(matches or models[:1], key=lambda path: (_is_dynamic(path), len(path), path))
    return _complete_set(best, paths)


def select_projector(paths: Sequence[str]) -> str:
    """The multimodal projector: F16 if there are several. Raises DownloadError."""
    found = sorted(path for path in paths if PurePosixPath(path).name.lower().startswith("mmproj"))
    if not found:
        raise DownloadError(f"there is no multimodal projector; there are: {_listed(paths)}")
    return next((path for path in found if quant_of(path) == "F16"), found[0])


def is_model(path: str) -> bool:
    return path.lower().endswith(".gguf") and not PurePosixPath(path).name.lower().startswith(_SIDECARS)


def _is_dynamic(path: str) -> bool:
    return quant_of(path).startswith("UD-")


def _has_quant(path: str, quant: str) -> bool:
    """By the end of the file's name; by its folder (`BF16/model-00001-of-00002.gguf`) if the name has no quant."""
    folder, _, name = path.rpartition("/")
    ending = re.compile(rf"(?:^|[-._]){re.escape(quant)}$", re.IGNORECASE)
    return bool(ending.search(_stem(name)) or (not quant_of(path) and ending.search(folder)))


def _stem(name: str) -> str:
    found = _SHARD.fullmatch(name)
    return found["stem"] if found else name[: -len(".gguf")]


def _complete_set(path: str, paths: Iterable[str]) -> tuple[str, ...]:
    shards = shards_of(path)
    if missing := sorted(set(shards) - set(paths)):
        raise DownloadError(f"{path} is one of {len(shards)} shards, and {missing[0]} is missing")
    return shards


def _listed(paths: Sequence[str]) -> str:
    shown = [path for path in sorted(paths) if shards_of(path)[0] == path]
    return (", ".join(shown[:12]) + (", ..." if len(shown) > 12 else "")) or "none"
