"""Builds a C++ test driver of tests/unit/native with engine sources, sanitized where the compiler can."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build_driver(name: str, sources: Sequence[str], folder: Path, *, is_long: bool = False) -> Path:
    """Path of the program. `sources` are relative to ggml_v100. Skips the test where no C++ compiler is there.

    is_long: it computes for long, optimised and not sanitized.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs a C++ compiler ({compiler[0]} is not there)")
    program = folder / name
    command = [
        *compiler,
        *("-std=c++20", "-O2" if is_long else "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"),
        *(SANITIZERS if not is_long and _sanitizers_work(compiler, folder) else ()),
        f"-I{REPOSITORY / 'ggml_v100'}",
        *(str(REPOSITORY / "ggml_v100" / source) for source in sources),
        str(REPOSITORY / "tests/unit/native" / f"{name}.cpp"),
        *("-o", str(program)),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


def _sanitizers_work(compiler: list[str], folder: Path) -> bool:
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    program = folder / "probe"
    command = [*compiler, *SANITIZERS, str(source), "-o", str(program)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        return False
    return subprocess.run([program], capture_output=True).returncode == 0
