"""`v100-get-models`: fetch the model that this engine is tuned for, with its drafter, or any GGUF repository.

What is there already is verified and kept; what was interrupted resumes. A BF16 drafter is converted to F16, which the
V100 computes with.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from pyllama.download.fetch import fetch
from pyllama.download.hub import Hub, Listing, hugging_face, modelscope
from pyllama.download.progress import report_on_stderr
from pyllama.download.selection import select_model, select_projector
from pyllama.download.session import Session
from pyllama.download.transfer import Job
from pyllama.errors import DownloadError

from .command_line import ArgumentParser, run_command

# Repositories have the same names on both hubs. The quant of the target is chosen by --quant.
TARGET = "unsloth/Qwen3.8-27B-GGUF"
DRAFTER = "z-lab/Qwen3.8-27B-DFlash2-GGUF:BF16"

HUBS: dict[str, Callable[..., Hub]] = {"ms": modelscope, "hf": hugging_face}


def argument_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="v100-get-models", description=__doc__.partition("\n\n")[0].partition(": ")[2])
    parser.add_argument(
        "models", nargs="*", metavar="REPO[:FILE]", help="fetch these instead; FILE: a path or a quant such as Q8_0"
    )
    parser.add_argument(
        "-s", dest="source", choices=HUBS, default="ms", help="hub: ms is ModelScope (default), hf is Hugging Face"
    )
    parser.add_argument(
        "-d", dest="directory", type=Path, default=Path("models"), metavar="DIR", help="default: ./models"
    )
    parser.add_argument("-q", dest="quantize", metavar="PATH", help="no effect: the conversion needs no llama-quantize")
    parser.add_argument(
        "--quant", type=str.lower, choices=("q8_0", "q4_k_m"), default="q8_0", help="of the target; default: q8_0"
    )
    parser.add_argument("--target", default=TARGET, metavar="REPO[:FILE]", help=f"default: {TARGET}")
    parser.add_argument("--drafter", default=DRAFTER, metavar="REPO[:FILE]", help=f"default: {DRAFTER}")
    parser.add_argument("--mmproj", action="store_true", help="fetch the target's multimodal projector as well")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.models and arguments.mmproj:
        parser.error("--mmproj goes with --target; of other repositories name the projector as REPO:FILE")
    if arguments.quantize is not None:
        print("note: -q has no effect: the conversion is built in", file=sys.stderr)
    for path in get_models(arguments):
        print(path)
    return 0


def run() -> None:
    run_command(main)


def get_models(arguments: argparse.Namespace) -> list[Path]:
    """Fetch what the arguments name. The files to load, in order: target, drafter, projector."""
    hub = HUBS[arguments.source](os.environ)
    wanted = arguments.models or [_with_quant(arguments.target, arguments.quant), arguments.drafter]
    with Session() as session:
        listings = {repo: hub.list_files(session, repo) for repo in dict.fromkeys(map(_repo, wanted))}
        models = [_model_jobs(hub, listings[_repo(model)], model, arguments.directory) for model in wanted]
        if arguments.mmproj:
            models.append(_projector_job(hub, listings[_repo(arguments.target)], arguments.directory))
        jobs = [job for model in models for job in model]
        _require_distinct_targets(jobs)
        with report_on_stderr() as report:
            fetch(jobs, session, report)
    paths = [model[0].target for model in models]
    if not arguments.models:
        paths[1] = f16_drafter(paths[1])
    return paths


def f16_drafter(path: Path) -> Path:
    """The F16 form of a BF16 drafter, beside it; made when it is missing or older. Other files stay as they are."""
    name = re.sub(r"bf16(?=\.gguf$)", "F16", path.name, flags=re.IGNORECASE)
    target = path.with_name(name)
    if target == path or (target.exists() and target.stat().st_mtime_ns >= path.stat().st_mtime_ns):
        return target
    from pyllama.quantize.pipeline import quantize_file

    print(f"converting {path.name} to {target.name}", file=sys.stderr)
    quantize_file(path, target, "F16")
    return target


def _model_jobs(hub: Hub, listing: Listing, model: str, directory: Path) -> list[Job]:
    repo, _, file = model.partition(":")
    names = {"file": file} if file.lower().endswith(".gguf") else {"quant": file}
    try:
        paths = select_model(list(listing.files), **names)
    except DownloadError as error:
        raise DownloadError(f"{repo}: {error}") from None
    return [_job(hub, listing, path, directory) for path in paths]


def _projector_job(hub: Hub, listing: Listing, directory: Path) -> list[Job]:
    return [_job(hub, listing, select_projector(list(listing.files)), directory)]


def _job(hub: Hub, listing: Listing, path: str, directory: Path) -> Job:
    return Job(listing.files[path], directory / PurePosixPath(path).name, hub.access)


def _require_distinct_targets(jobs: Sequence[Job]) -> None:
    urls: dict[Path, str] = {}
    for job in jobs:
        if urls.setdefault(job.target, job.remote.url) != job.remote.url:
            raise DownloadError(f"two files would be named {job.target}; fetch them into different folders")


def _with_quant(model: str, quant: str) -> str:
    return model if ":" in model else f"{model}:{quant}"


def _repo(model: str) -> str:
    return model.partition(":")[0]


if __name__ == "__main__":
    run()
