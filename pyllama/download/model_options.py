"""From the options that name a model (`-m`, `-hf`, `-hff`, `-mu`, `--offline`) to a local file."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pyllama.errors import DownloadError, InvalidArgument
from pyllama.options import Options

from .cache import PRESET, gguf_paths, model_cache
from .selection import checked_repo, select_model, shards_of

if TYPE_CHECKING:  # a program that loads a local file need not wait until the HTTP client is imported
    from .transfer import Job


MAX_PRESET_BYTES = 1 << 20


class PresetRepository(DownloadError):
    """A repository has a `preset.ini`: it names models for `llama-server`, and is no model itself. `path`: a copy."""

    def __init__(self, repo: str, path: Path) -> None:
        super().__init__(f"{repo} holds presets for llama-server, not a model; a quant or a file would name one")
        self.path = path


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """`path`: the file to load once `fetch` was called. `finish` runs when all jobs are done."""

    path: str
    jobs: tuple["Job", ...] = ()
    finish: Callable[[], None] | None = None

    def and_also(self, other: "ChosenModel") -> "ChosenModel":
        """This model, whose download brings the other one as well."""
        finishers = [finish for finish in (self.finish, other.finish) if finish is not None]

        def finish() -> None:
            for one in finishers:
                one()

        return ChosenModel(self.path, (*self.jobs, *other.jobs), finish if finishers else None)

    def fetch(self, write: Callable[[str], None] | None = None) -> str:
        """Download what is missing. write: takes lines of progress; None shows it on standard error.

        Raises DownloadError, or what the file system raises.
        """
        if self.jobs:
            from .fetch import fetch
            from .progress import Lines, report_on_stderr
            from .session import Session

            with Session() as session, Lines(write) if write else report_on_stderr() as report:
                fetch(self.jobs, session, report)
        if self.finish is not None:
            self.finish()
        return self.path


def choose_model(options: Options, environ: Mapping[str, str], note: Callable[[str], None] = _note) -> ChosenModel:
    """The model that the options of `llama-server` or `llama-cli` name. Looks repositories up, downloads nothing yet.

    note: takes lines for the user. Raises InvalidArgument or DownloadError.
    """
    if options.hf_file and not options.hf_repo:
        raise InvalidArgument("--hf-file needs a repository: --hf-repo USER/MODEL")
    if options.hf_repo and (options.model or options.model_url):
        raise InvalidArgument("a model is given twice: use one of --model, --hf-repo and --model-url")
    source = ModelSource(environ, options.hf_token, options.offline, note)
    if options.hf_repo:
        return source.repository_model(options.hf_repo, options.hf_file)
    if options.model_url:
        return source.url_model(options.model_url, Path(options.model) if options.model else None)
    if not options.model:
        raise InvalidArgument("no model given; use -m FILE, -hf USER/MODEL[:QUANT] or -mu URL")
    return ChosenModel(options.model)


def choose_draft_model(
    options: Options, environ: Mapping[str, str], note: Callable[[str], None] = _note
) -> ChosenModel | None:
    """The draft model that the options name (`--spec-draft-hf`, `--spec-draft-model`), as `choose_model`; or None.

    With a repository, `--spec-draft-model` is the name of a file in it.
    """
    if options.spec_draft_hf:
        source = ModelSource(environ, options.hf_token, options.offline, note)
        return source.repository_model(options.spec_draft_hf, options.spec_draft_model)
    return ChosenModel(options.spec_draft_model) if options.spec_draft_model else None


def with_local_models(options: Options, environ: Mapping[str, str]) -> Options:
    """The options of `llama-bench` with the repositories, downloaded, behind the files in `model`.

    One `--hf-file` goes with each repository, or none at all. Raises InvalidArgument or DownloadError.
    """
    files = options.hf_file or ("",) * len(options.hf_repo)
    if len(files) != len(options.hf_repo):
        raise InvalidArgument(f"--hf-file is given {len(files)} times and --hf-repo {len(options.hf_repo)} times")
    source = ModelSource(environ, options.hf_token, options.offline)
    chosen = [source.repository_model(repo, file) for repo, file in zip(options.hf_repo, files, strict=True)]
    models = (*options.model, *(model.fetch() for model in chosen))
    if not models:
        raise InvalidArgument("no model given; use -m FILE or -hf USER/MODEL[:QUANT]")
    return replace(options, values={**options.values, "model": models})


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Hub and cache as the environment sets them. token: for Hugging Face; None takes HF_TOKEN."""

    environ: Mapping[str, str]
    token: str | None = None
    offline: bool = False
    note: Callable[[str], None] = _note

    def repository_model(self, repo_and_quant: str, file: str = "") -> ChosenModel:
        """The model of a value like `-hf USER/MODEL[:QUANT]`; `file`, a path in the repository, wins over the quant.

        Without the network, what is in the cache must do. Raises DownloadError, `PresetRepository` where neither a
        quant nor a file is named and the repository has presets.
        """
        repo, _, quant = repo_and_quant.partition(":")
        checked_repo(repo)
        quant = "" if quant.lower() == "latest" else quant
        if self.offline:
            if (cached := self._cached(repo, quant, file)) is None:
                raise DownloadError(f"{repo_and_quant} is not in the cache, and --offline forbids to fetch it")
            return cached
        from .session import Unreachable

        try:
            return self._listed(repo, quant, file)
        except Unreachable as error:
            if (cached := self._cached(repo, quant, file)) is None:
                raise
            self.note(f"{error}; using {cached.path}")
            return cached

    def url_model(self, url: str, target: Path | None = None) -> ChosenModel:
        """The model at `url`, with all shards, kept at `target` or in the cache. Raises DownloadError."""
        from .hub import RemoteFile, hugging_face
        from .session import parsed_url
        from .transfer import Job

        path = parsed_url(url).raw_path.decode("ascii").partition("?")[0]
        first = target or model_cache(self.environ).url_target(url)
        name = path.rpartition("/")[2]
        shards = shards_of(unquote(name))
        targets = [first.with_name(shard) for shard in shards] if len(shards) > 1 else [first]
        if self.offline:
            if missing := [path for path in targets if not path.is_file()]:
                raise DownloadError(f"{missing[0]} is not there, and --offline forbids to fetch it")
            return ChosenModel(str(targets[0]))
        access = hugging_face(self.environ, self.token).access
        urls = [url.replace(name, shard) for shard in shards] if len(shards) > 1 else [url]
        files = zip(shards, urls, targets, strict=True)
        jobs = tuple(Job(RemoteFile(shard, address, None, None), path, access) for shard, address, path in files)
        return ChosenModel(str(targets[0]), jobs)

    def _listed(self, repo: str, quant: str, file: str) -> ChosenModel:
        from .hub import hugging_face
        from .session import Session, Unreachable
        from .transfer import Job

        hub = hugging_face(self.environ, self.token)
        cache = model_cache(self.environ)
        try:
            with Session() as session:
                listing = hub.list_files(session, repo)
                if listing.preset is not None and not quant and not file:
                    text = session.get_bytes(listing.preset.url, hub.access, MAX_PRESET_BYTES)
                    raise PresetRepository(repo, cache.put_preset(repo, listing.revision, text))
        except (Unreachable, PresetRepository):
            raise
        except DownloadError as error:
            raise DownloadError(f"failed to fetch model metadata: {error}") from None
        paths = _selected(repo, list(listing.files), quant, file)
        folder = cache.snapshot(repo, listing.revision)
        jobs: list[Job] = []
        links: dict[Path, Path] = {}
        for path in paths:
            remote, name = listing.files[path], folder / path
            if remote.sha256 is None:
                jobs.append(Job(remote, name, hub.access))
                continue
            links[name] = blob = cache.blob(repo, remote.sha256)
            if not blob.exists():  # complete: it gets this name last
                jobs.append(Job(remote, blob, hub.access))

        def finish() -> None:
            for name, blob in links.items():
                cache.link(name, blob)
            cache.set_latest(repo, listing.revision)

        return ChosenModel(str(folder / paths[0]), tuple(jobs), finish)

    def _cached(self, repo: str, quant: str, file: str) -> ChosenModel | None:
        for snapshot in model_cache(self.environ).snapshots(repo):
            if not quant and not file and (snapshot / PRESET).is_file():
                raise PresetRepository(repo, snapshot / PRESET)
            try:
                paths = select_model(gguf_paths(snapshot), quant=quant, file=file)
            except DownloadError:
                continue  # another revision may hold it
            return ChosenModel(str(snapshot / paths[0]))
        return None


def _selected(repo: str, paths: list[str], quant: str, file: str) -> tuple[str, ...]:
    try:
        return select_model(paths, quant=quant, file=file)
    except DownloadError as error:
        raise DownloadError(f"{repo}: {error}") from None
