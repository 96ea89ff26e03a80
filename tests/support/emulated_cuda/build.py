"""Compiles the kernels as C++ of this machine, and the driver library that runs them.

A unit of units.json becomes a shared object: preprocessed with language.h before it, then what a host compiler does
not know is replaced (`host_source`) and a table of its kernels is added. Everything is kept under its hash in a cache,
so only what changed is compiled.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from filelock import FileLock

from compile_kernels import KERNELS, MAGIC, Unit, read_units, sources_key

HERE = Path(__file__).resolve().parent
LANGUAGE = ("language.h", "cuda_fp16.h", "executor.h")
KERNEL_FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique",
    "-fno-strict-aliasing",  # kernels look at the bits of values through pointers of other types
    "-ffp-contract=off",  # so that results do not depend on the host's instructions
    "-fsanitize=alignment,bounds,shift-exponent", "-fno-sanitize-recover=all",  # reported by executor.cpp
    "-w",  # the kernels' warnings are those of their own compiler
)  # fmt: skip
DRIVER_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=default", "-shared", "-pthread",
    "-Wall", "-Wextra", "-Werror",
    "-Wno-psabi",  # vectors as arguments, which do not leave the library
    "-Wno-restrict",  # of gcc 12 in the sum of two strings, where there is nothing
    "-Wl,-soname,libcuda_emulated.so.1",  # by which units find it; a real libcuda.so.1 can be loaded beside it
    "-Wl,-z,nodelete",  # its threads outlive whoever loaded it
)  # fmt: skip
DRIVER_SOURCES = ("executor.cpp", "libcuda.cpp", "objects.cpp")
DRIVER_HEADERS = ("executor.h", "launch.h", "objects.h")


class BuildError(Exception):
    """Something does not compile; the text says what."""


class NoCompilerError(BuildError):
    """There is no C++ compiler."""


def cache_dir() -> Path:
    """`$EMULATED_CUDA_CACHE`, else `$XDG_CACHE_HOME/pyllama/emulated-cuda`, else the same below `~/.cache`."""
    if override := os.environ.get("EMULATED_CUDA_CACHE"):
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pyllama" / "emulated-cuda"


def ensure_built(units: Iterable[str] | None = None, jobs: int | None = None) -> Path:
    """A folder with `libcuda.so.1` and `kernels.archive`: for LD_LIBRARY_PATH and V100_KERNELS_DIR.

    `units` are names of units.json, by default all. Raises BuildError, where there is no compiler NoCompilerError.
    """
    table = {unit.name: unit for unit in read_units()}
    names = list(table) if units is None else list(dict.fromkeys(units))
    unknown = [name for name in names if name not in table]
    if unknown:
        raise BuildError(f"no such kernel unit: {', '.join(unknown)}")
    return build_units([table[name] for name in names], jobs)


def build_units(units: Sequence[Unit], jobs: int | None = None) -> Path:
    """The same of units that need not be those of units.json."""
    root = cache_dir()
    for folder in ("stamps", "units", "locks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    library = _build_driver(root)
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        made = list(pool.map(lambda unit: _build_unit(root, unit, library), units))
    return _folder(root, library, {unit.name: path for unit, path in zip(units, made, strict=True)})


# --- the compiler -----------------------------------------------------------------------------------------------------


@cache
def _compiler() -> tuple[str, ...]:
    compiler = tuple(shlex.split(os.environ.get("CXX", "c++")))
    if shutil.which(compiler[0]) is None:
        raise NoCompilerError(f"needs a C++ compiler ({compiler[0]} is not there)")
    return compiler


@cache
def _machine_flags() -> tuple[str, ...]:
    # Conversions of halves and fma are many times faster as instructions.
    if platform.machine() != "x86_64":
        return ()
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "f16c", "bmi2", "movbe"} <= has else ()


@cache
def _identity() -> str:
    version = subprocess.run([*_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return f"{version.splitlines()[0]} {_machine_flags()}"


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{what}: {done.stderr}")
    return done.stdout


def _digest(*parts: str | Path | Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.name.encode() + b"\0" + part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:20]


# --- the driver library -----------------------------------------------------------------------------------------------


def _build_driver(root: Path) -> Path:
    sources = [HERE / name for name in DRIVER_SOURCES]
    key = _digest(_identity(), DRIVER_FLAGS, *sources, *(HERE / name for name in DRIVER_HEADERS))
    library = root / f"driver-{key}" / "libcuda.so.1"
    with FileLock(root / "locks" / "driver"):
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            partial = library.with_suffix(".partial")
            command = [*_compiler(), *DRIVER_FLAGS, *_machine_flags(), *map(str, sources), "-ldl", "-o", str(partial)]
            _run(command, "the emulated driver")
            partial.replace(library)
    return library


# --- a unit -----------------------------------------------------------------------------------------------------------


def _build_unit(root: Path, unit: Unit, library: Path) -> Path:
    # Programs that build at the same time share the work.
    with FileLock(root / "locks" / unit.name):
        return _build_locked(root, unit, library)


def _build_locked(root: Path, unit: Unit, library: Path) -> Path:
    headers = [*sorted(KERNELS.glob("*.cuh")), *sorted(KERNELS.glob("*.h")), *(HERE / name for name in LANGUAGE)]
    flags = [*KERNEL_FLAGS, *_machine_flags()]
    defines = [f"-D{name}={value}" for name, value in unit.defines.items()]
    stamp = root / "stamps" / _digest(_identity(), KERNEL_FLAGS, defines, Path(__file__), unit.source, *headers)
    if stamp.exists() and (made := Path(stamp.read_text())).exists():
        return made
    command = [*_compiler(), *flags, *defines, f"-I{HERE}", f"-I{KERNELS}", "-include", str(HERE / "language.h")]
    preprocessed = _run([*command, "-x", "c++", "-E", str(unit.source)], unit.name)
    # Lines are told without folders: the same kernels of another copy of the repository are the same unit.
    text = re.sub(r'^(# \d+ ")[^"\n]*/', r"\1", host_source(preprocessed), flags=re.MULTILINE)
    made = root / "units" / f"{unit.name}-{_digest(_identity(), KERNEL_FLAGS, DRIVER_FLAGS, text)}.so"
    if not made.exists():
        source, compiled, partial = made.with_suffix(".ii"), made.with_suffix(".o"), made.with_suffix(".partial")
        source.write_text(text)
        _run([*_compiler(), *flags, "-c", str(source), "-o", str(compiled)], unit.name)
        # Linked with the driver library by its name: the one that loads the unit is there already. In a step of its
        # own, so that it is the driver library that has the functions of the compiler's checks.
        _run([*_compiler(), "-shared", str(compiled), "-o", str(partial), str(library)], unit.name)
        partial.replace(made)
        source.unlink(), compiled.unlink()
    stamp.write_text(str(made))
    return made


DYNAMIC_SHARED = re.compile(
    r"\bextern\s+__shared__\s+(?:__attribute__\s*\(\(.*?\)\)\s*|alignas\s*\(\w+\)\s*)*([\w: ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
KERNEL_HEAD = re.compile(r'extern\s+"C"\s+__global__\s+void\s+')
KERNEL_NAME = re.compile(r"\s*(\w+)\s*\(\s*(?:const\s+)?([\w:]+)\s+\w+\s*\)")


def host_source(text: str) -> str:
    """Preprocessed CUDA as C++ with a table of its kernels.

    Static shared memory becomes storage of the host's thread, which runs one block at a time; dynamic shared memory a
    pointer that is asked for. A kernel takes one struct.
    """
    text = DYNAMIC_SHARED.sub(r"\1* const \2 = static_cast<\1*>(emulated_cuda::dynamic_shared());", text)
    text = re.sub(r"\b__shared__\b", "thread_local", text)
    parts, rows, at = [], [], 0
    while head := KERNEL_HEAD.search(text, at):
        parts.append(text[at : head.start()])
        at, threads = head.end(), "0"
        if text.startswith("__launch_bounds__", at):
            bounds, at = _arguments(text, text.index("(", at))
            threads = bounds[0]
        name = KERNEL_NAME.match(text, at)
        if name is None:
            raise BuildError(f"a kernel that does not take one struct: {text[head.start() : at + 80]!r}")
        parts.append(f'extern "C" void {name[0].strip()}')
        rows.append(
            f'{{"{name[1]}", sizeof({name[2]}), ({threads}), '
            f"[](const void* parameter) {{ {name[1]}(*static_cast<const {name[2]}*>(parameter)); }}}},"
        )
        at = name.end()
    parts.append(text[at:])
    if not rows:
        raise BuildError("no kernel in the unit")
    table = "\n    ".join(rows)
    parts.append(f"""
namespace v100::cuda {{
namespace {{
const emulated_cuda::Kernel emulated_kernels[] = {{
    {table}
}};
thread_local char shared_anchor;
void* address_of_shared() {{ return &shared_anchor; }}
const emulated_cuda::Unit unit = {{emulated_kernels, {len(rows)}, address_of_shared}};
}}  // namespace
}}  // namespace v100::cuda
extern "C" __attribute__((visibility("default"))) const emulated_cuda::Unit* emulated_unit() {{
  return &v100::cuda::unit;
}}
""")
    return "".join(parts)


def _arguments(text: str, at: int) -> tuple[list[str], int]:
    """The arguments of the parenthesis that opens at `at`, and the place after it."""
    arguments, depth, start = [], 0, at + 1
    for i in range(at, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        if (depth == 1 and text[i] == ",") or depth == 0:
            arguments.append(text[start:i].strip())
            start = i + 1
        if depth == 0:
            return arguments, i + 1
    raise BuildError("a parenthesis is not closed")


# --- the folder -------------------------------------------------------------------------------------------------------


def _folder(root: Path, library: Path, objects: dict[str, Path]) -> Path:
    folder = root / f"set-{_digest(str(library), sources_key(), [f'{n} {p}' for n, p in objects.items()])}"
    archive = folder / "kernels.archive"
    with FileLock(root / "locks" / folder.name):
        if not archive.exists():
            folder.mkdir(exist_ok=True)
            link = folder / "libcuda.so.1"
            if not link.exists():
                link.symlink_to(library)
            partial = folder / "kernels.partial"
            partial.write_bytes(archive_of(objects))
            partial.replace(archive)
    return folder


def archive_of(objects: dict[str, Path]) -> bytes:
    """kernels.archive as compile_kernels.py writes it, whose code names the shared object of a unit."""

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode()

    def data(raw: bytes) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = packer.compress(raw) + packer.flush()
        return struct.pack("<II", len(raw), len(packed)) + packed

    parts = [MAGIC, text(sources_key()), text("emulated"), struct.pack("<I", len(objects))]
    for name, path in objects.items():
        image = f"emulated unit\n{path}\n\0".encode()
        parts += [text(name), data(image), data(image)]
    return b"".join(parts)
