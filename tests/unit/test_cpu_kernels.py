"""The CPU backend's kernels of every instruction set against the scalar reference, bit for bit.

The C++ driver is in cpu_kernels/. Also checks that files compiled for an instruction set share no code with the rest:
the linker could otherwise pick a copy of an inline function that older processors cannot run.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "ggml_v100"
DRIVER = Path(__file__).resolve().parent / "cpu_kernels"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread", f"-I{ENGINE}", f"-I{DRIVER}"]
INSTRUCTION_SET_FLAGS = {  # by the end of the file's name, as in ggml_v100/cpu/CMakeLists.txt
    "_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"],
}
SECTIONS = (
    "rows",
    "linear_shapes",
    "linear_extremes",
    "linear_combinations",
    "linear_real_sizes",
    "linear_accuracy",
    "attention",
    "attention_unseen_keys",
    "sparse_attention",
    "streams",
    "block_conv",
    "experts",
    "routing",
    "gates",
    "causal_conv",
    "delta_net",
    "encoder_searches",
    "errors",
    "negative_control",
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def sources() -> list[Path]:
    """All engine sources that the CPU backend and the reference need, and the driver."""
    engine = [ENGINE / "base" / name for name in ("thread_pool.cpp", "thread_settings.cpp", "cpu_features.cpp")]
    engine.append(ENGINE / "parallel" / "collective.cpp")
    rooms = ("quants", "tensor", "ops", "cpu")
    engine += [path for room in rooms for path in sorted((ENGINE / room).glob("*.cpp"))]
    if not IS_X86:
        engine = [path for path in engine if "avx" not in path.name]
    return engine + sorted(DRIVER.glob("*.cpp"))


def compile_object(source: Path, directory: Path) -> Path:
    target = directory / f"{source.parent.name}_{source.stem}.o"
    flags = FLAGS + [
        flag for end, flags in INSTRUCTION_SET_FLAGS.items() if source.name.endswith(end) for flag in flags
    ]
    done = subprocess.run([COMPILER, *flags, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"{source.name} does not compile:\n{done.stderr[-4000:]}")
    return target


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("cpu_kernels")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda source: compile_object(source, directory), sources()))


@pytest.fixture(scope="module")
def driver(objects: list[Path]) -> Path:
    target = objects[0].parent / "cpu_kernels"
    subprocess.run([COMPILER, "-pthread", *map(str, objects), "-o", str(target)], check=True)
    return target


def available_sections(driver: Path) -> dict[str, set[str]]:
    """What the driver offers on this machine: instruction set -> sections."""
    offered: dict[str, set[str]] = {}
    for line in subprocess.run([str(driver)], capture_output=True, text=True, check=True).stdout.splitlines():
        name, section = line.split()
        offered.setdefault(name, set()).add(section)
    return offered


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("instruction_set", ["generic", "avx2", "avx512"])
def test_backend_equals_reference_bit_for_bit(driver: Path, instruction_set: str, section: str) -> None:
    if instruction_set not in available_sections(driver):
        pytest.skip(f"needs a processor with {instruction_set}")
    threads = {"generic": 1, "avx2": 2, "avx512": 3}[instruction_set]
    done = subprocess.run(
        [str(driver), instruction_set, str(threads), section], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_number_of_threads_does_not_change_bits(driver: Path, threads: int) -> None:
    best = list(available_sections(driver))[-1]
    sections = (
        "linear_combinations",
        "attention_unseen_keys",
        "sparse_attention",
        "experts",
        "causal_conv",
        "delta_net",
    )
    for section in sections:
        done = subprocess.run([str(driver), best, str(threads), section], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_driver_offers_exactly_the_sections_tested_here(driver: Path) -> None:
    for offered in available_sections(driver).values():
        assert offered == set(SECTIONS)


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_instruction_set_files_share_no_functions(objects: list[Path]) -> None:
    for path in objects:
        if "_avx" not in path.name:
            continue
        symbols = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        shared = [line for line in symbols.splitlines() if line.split()[-2:-1] in (["W"], ["V"]) or " W " in line]
        assert not shared, f"{path.name} emits functions that the linker may share: {shared[:5]}"
