"""Compiles the kernels of `kernels/` for SM70 and packs them into one archive; part of the build (docs/kernels.md).

    compile_kernels.py --find                prints the compiler it would use; exit 3 when there is none
    compile_kernels.py --out DIR [-j N]      DIR/UNIT.cubin, .ptx, .log of every unit and DIR/kernels.archive
    compile_kernels.py --out DIR --bench     the same without tensor instructions: right loads, wrong sums
    compile_kernels.py --out DIR --racecheck the same with barriers of whole blocks only, for compute-sanitizer

A unit is one row of `kernels/units.json`: a source file and the macros that choose its variant. It becomes a cubin for
sm_70, which needs no compiler at run time, and PTX for compute_70, which the driver of a newer card compiles.
The compiler is NVRTC 12.4 from its wheel (nvidia-cuda-nvrtc-cu12, with the headers of nvidia-cuda-runtime-cu12) or else
an nvcc of CUDA 11.8 to 12.9; CUDA 13 cannot target SM70. Only units whose sources changed are compiled again.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).resolve().parent / "kernels"
SHARED_HEADERS = (KERNELS.parents[1] / "quants/codebook_codes.h",)  # of the host's code, included by kernels
MAGIC = b"V100KRN1"
NO_COMPILER = 3  # exit status
NVCC_OLDEST, NVCC_NEWEST = (11, 8), (12, 9)
COMMON_FLAGS = ("--std=c++20", "--fmad=true")  # products and sums contract; kernels that must not say so with __fmul_rn


class CompileError(Exception):
    """A kernel does not compile; the text is the compiler's log."""


class Unit(NamedTuple):
    name: str
    source: Path
    defines: dict[str, str]
    bytes_of_32: float | None  # of a unit that streams weights: bytes of 32 of them, for scripts/kernel_report.py


class Compiled(NamedTuple):
    cubin: bytes
    ptx: bytes
    log: str  # registers, spills and shared memory of every kernel, as ptxas prints them


def read_units() -> list[Unit]:
    """The rows of units.json."""
    table = json.loads((KERNELS / "units.json").read_text())
    return [
        Unit(name, KERNELS / row["source"], row.get("defines", {}), row.get("bytes_of_32"))
        for name, row in table.items()
    ]


def sources_key() -> str:
    """A digest of all that kernels are made of. The host code that launches them is compiled with the same key."""
    digest = hashlib.sha256()
    for path in [*sorted(KERNELS.iterdir()), *SHARED_HEADERS]:
        if path.suffix in (".cu", ".cuh", ".h", ".json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Nvrtc:
    """NVRTC and the CUDA headers, from the wheels of the running interpreter."""

    def __init__(self, library: Path, include: Path) -> None:
        self._path, self._include = library, include
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    @classmethod
    def find(cls) -> Nvrtc | None:
        spec = importlib.util.find_spec("nvidia")
        roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
        libraries = [path for root in roots for path in sorted(root.glob("cuda_nvrtc/lib/libnvrtc.so.12"))]
        headers = [path for root in roots for path in root.glob("cuda_runtime/include/cuda_fp16.h")]
        return cls(libraries[0], headers[0].parent) if libraries and headers else None

    def describe(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self._path})"

    def identity(self) -> str:
        return f"nvrtc {self.version[0]}.{self.version[1]}"

    def compile(self, unit: Unit, defines: dict[str, str]) -> Compiled:
        flags = [*COMMON_FLAGS, "--device-as-default-execution-space", f"-I{KERNELS}", f"-I{self._include}"]
        flags += [f"-D{name}={value}" for name, value in defines.items()]
        flags += ["--gpu-architecture=sm_70", "--ptxas-options=-v"]
        library = self._library
        program = ctypes.c_void_p()
        source = unit.source.read_bytes()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), source, unit.source.name.encode(), 0, None, None))
        try:
            options = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
            status = library.nvrtcCompileProgram(program, len(flags), options)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise CompileError(f"{unit.name} ({unit.source.name}): {log or self._words(status)}")
            # The cubin was made from this PTX: no second compilation for compute_70 is needed.
            return Compiled(self._bytes(program, "CUBIN"), self._bytes(program, "PTX"), log)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise CompileError(f"NVRTC: {self._words(status)}")

    def _words(self, status: int) -> str:
        return self._library.nvrtcGetErrorString(status).decode()


class Nvcc:
    """nvcc of an installed toolkit."""

    def __init__(self, program: str, version: tuple[int, int]) -> None:
        self._program, self.version = program, version

    @classmethod
    def find(cls) -> Nvcc | None:
        program = shutil.which("nvcc")
        if program is None:
            return None
        text = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        match = re.search(r"release (\d+)\.(\d+)", text)
        version = (int(match[1]), int(match[2])) if match else (0, 0)
        return cls(program, version) if NVCC_OLDEST <= version <= NVCC_NEWEST else None

    def describe(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]} ({self._program})"

    def identity(self) -> str:
        return f"nvcc {self.version[0]}.{self.version[1]}"

    def compile(self, unit: Unit, defines: dict[str, str]) -> Compiled:
        flags = [self._program, *COMMON_FLAGS, f"-I{KERNELS}", *(f"-D{n}={v}" for n, v in defines.items())]
        cubin, log = self._run(unit, [*flags, "--cubin", "--gpu-architecture=sm_70", "--ptxas-options=-v"])
        ptx, _ = self._run(unit, [*flags, "--ptx", "--gpu-architecture=compute_70"])
        return Compiled(cubin, ptx, log)

    def _run(self, unit: Unit, command: list[str]) -> tuple[bytes, str]:
        product = Path(f".{unit.name}.{os.getpid()}.out").resolve()
        command = [*command, "-o", str(product), str(unit.source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise CompileError(f"{unit.name} ({unit.source.name}): {done.stderr}")
            return product.read_bytes(), done.stderr
        finally:
            product.unlink(missing_ok=True)


def find_compiler() -> Nvrtc | Nvcc | None:
    """The compiler of this machine that can target SM70."""
    return Nvrtc.find() or Nvcc.find()


def _files_of(source: Path) -> list[Path]:
    """A unit's source and the headers of ours that it includes, sorted."""
    found, waiting = {source}, [source]
    while waiting:
        for name in re.findall(rb'^\s*#\s*include\s+"([^"]+)"', waiting.pop().read_bytes(), re.MULTILINE):
            header = KERNELS / name.decode()
            if header not in found:
                found.add(header)
                waiting.append(header)
    return sorted(found)


def _unit_key(unit: Unit, defines: dict[str, str], compiler: str) -> str:
    # Of what the unit consists of alone, so that one kernel's change does not compile the others.
    digest = hashlib.sha256(f"{compiler} {COMMON_FLAGS} {sorted(defines.items())}".encode())
    for path in _files_of(unit.source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile_unit(unit: Unit, defines: dict[str, str], out: Path) -> str | None:
    # In a process of its own, with its own NVRTC. Returns the error: it crosses processes better than an exception.
    compiler = find_compiler()
    if compiler is None:
        return "the compiler is gone"
    key = _unit_key(unit, defines, compiler.identity())
    stamp = out / f"{unit.name}.key"
    if stamp.exists() and stamp.read_text() == key:
        return None
    try:
        done = compiler.compile(unit, defines)
    except CompileError as error:
        return str(error)
    (out / f"{unit.name}.cubin").write_bytes(done.cubin)
    (out / f"{unit.name}.ptx").write_bytes(done.ptx.rstrip(b"\0"))
    (out / f"{unit.name}.log").write_text(done.log)
    stamp.write_text(key)
    return None


def write_archive(out: Path, units: list[Unit], compiler: str) -> Path:
    """kernels.archive: magic, key, compiler, then for each unit its name, cubin and PTX, deflated.

    Numbers are little-endian u32. A text is length and bytes; data is length, deflated length and deflated bytes.
    """

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode()

    def data(path: Path) -> bytes:
        raw = path.read_bytes()
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = packer.compress(raw) + packer.flush()
        return struct.pack("<II", len(raw), len(packed)) + packed

    parts = [MAGIC, text(sources_key()), text(compiler), struct.pack("<I", len(units))]
    for unit in units:
        parts += [text(unit.name), data(out / f"{unit.name}.cubin"), data(out / f"{unit.name}.ptx")]
    path = out / "kernels.archive"
    path.write_bytes(b"".join(parts))
    return path


def compile_all(
    out: Path, jobs: int, bench: bool = False, only: re.Pattern[str] | None = None, racecheck: bool = False
) -> Path:
    """Compiles every unit (whose name matches `only`) and writes the archive. Raises CompileError with all logs."""
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("neither NVRTC 12 (nvidia-cuda-nvrtc-cu12) nor an nvcc of CUDA 11.8 to 12.9 is there")
    out.mkdir(parents=True, exist_ok=True)
    units = [unit for unit in read_units() if only is None or only.search(unit.name)]
    extra = {"V100_BENCH_NO_MMA": "1"} if bench else {}
    if racecheck:
        extra["V100_RACECHECK"] = "1"
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        results = [pool.submit(_compile_unit, unit, unit.defines | extra, out) for unit in units]
        errors = [error for result in results if (error := result.result())]
    if errors:
        raise CompileError("\n".join(errors))
    return write_archive(out, units, compiler.identity())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the kernels for SM70 into an archive.")
    parser.add_argument("--find", action="store_true", help="print the compiler and exit")
    parser.add_argument("--key", action="store_true", help="print the key of the sources and exit")
    parser.add_argument("--out", type=Path, help="folder of the products")
    parser.add_argument("--only", type=re.compile, help="units whose name has a match of this pattern")
    parser.add_argument("--bench", action="store_true", help="without tensor instructions: for timing loads only")
    parser.add_argument("--racecheck", action="store_true", help="with barriers of whole blocks only")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.key:
        print(sources_key())
        return 0
    compiler = find_compiler()
    if compiler is None:
        print("no compiler for SM70: neither NVRTC 12 nor nvcc 11.8 to 12.9", file=sys.stderr)
        return NO_COMPILER
    if arguments.find:
        print(compiler.describe())
        return 0
    if arguments.out is None:
        parser.error("--out is missing")
    try:
        archive = compile_all(arguments.out, arguments.jobs, arguments.bench, arguments.only, arguments.racecheck)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{archive}: {archive.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
