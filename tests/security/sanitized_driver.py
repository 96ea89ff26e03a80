"""Compiles the C++ drivers of this directory with AddressSanitizer and UndefinedBehaviorSanitizer, and runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = HERE.parents[1] / "ggml_v100"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", f"-I{ENGINE}", *SANITIZE)
OPTIONS = {
    # An allocation far above the size of the test files means that a claimed size was believed.
    "ASAN_OPTIONS": "max_allocation_size_mb=64:allocator_may_return_null=0:quarantine_size_mb=8",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class SanitizersUnavailable(Exception):
    """There is no compiler here, or none with the sanitizers' runtime."""


@dataclass(frozen=True, slots=True)
class SanitizedDrivers:
    """Programs in `directory`, one per driver source; `options` are environment variables for the sanitizers."""

    directory: Path
    options: dict[str, str]

    def run(self, program: str, *arguments: str, stdin: bytes = b"") -> list[str]:
        """Lines of output. A crash or a sanitizer report fails the test with the report."""
        command = [str(self.directory / program), *arguments]
        result = subprocess.run(command, input=stdin, capture_output=True, env=os.environ | self.options, timeout=120)
        report = result.stderr.decode(errors="replace")
        assert (result.returncode, report[:8000]) == (0, "")
        return result.stdout.decode(errors="replace").splitlines()


def _find_compiler() -> str:
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    found = next((name for name in candidates if name and shutil.which(name)), None)
    if found is None:
        raise SanitizersUnavailable("no C++ compiler found")
    return found


def _usable_options(compiler: str, directory: Path) -> dict[str, str]:
    """Sanitizer options with which an empty program runs."""
    source, program = directory / "probe.cpp", directory / "probe"
    source.write_text("int main() { return 0; }\n")
    built = subprocess.run([compiler, *FLAGS, str(source), "-o", str(program)], capture_output=True, text=True)
    if built.returncode != 0:
        raise SanitizersUnavailable(f"{compiler} cannot build with {SANITIZE[0]}: {built.stderr[-500:]}")
    failure = ""
    # The leak checker traces its own process, which some containers forbid; the other checks do not need that.
    for leaks in (1, 0):
        options = OPTIONS | {"ASAN_OPTIONS": f"{OPTIONS['ASAN_OPTIONS']}:detect_leaks={leaks}"}
        ran = subprocess.run([str(program)], capture_output=True, text=True, env=os.environ | options)
        if ran.returncode == 0:
            return options
        failure = ran.stderr[-500:]
    raise SanitizersUnavailable(f"programs built with {SANITIZE[0]} do not run here: {failure}")


def _run_compiler(command: list[str]) -> None:
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{built.stderr[-4000:]}")


def build_drivers(directory: Path) -> SanitizedDrivers:
    """Compile the reader, the decoders and the drivers into `directory`; about 20 s of processor time.

    Raises SanitizersUnavailable, and RuntimeError with the compiler's words when our own sources do not compile.
    """
    compiler = _find_compiler()
    options = _usable_options(compiler, directory)
    library = [ENGINE / "base" / name for name in ("cpu_features.cpp", "mapped_file.cpp")]
    library += sorted((ENGINE / "gguf").glob("*.cpp"))
    encoding = ("encode", "convert")  # no part of reading
    library += [path for path in sorted((ENGINE / "quants").glob("*.cpp")) if not path.name.startswith(encoding)]
    drivers = sorted(HERE.glob("*_driver.cpp"))

    def compile_source(source: Path) -> str:
        target = str(directory / f"{source.parent.name}-{source.stem}.o")
        _run_compiler([compiler, *FLAGS, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_source, [*drivers, *library]))
    for driver, driver_object in zip(drivers, objects, strict=False):
        program = str(directory / driver.stem)
        _run_compiler([compiler, *FLAGS, driver_object, *objects[len(drivers) :], "-o", program])
    return SanitizedDrivers(directory, options)
