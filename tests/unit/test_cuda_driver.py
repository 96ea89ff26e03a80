"""The CUDA driver layer over a driver library made for the test: no GPU, no driver.

What the layer does on a real card is tested in tests/cuda.
"""

from __future__ import annotations

import os
import random
import shlex
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.native_build import REPOSITORY, build_driver

SOURCES = (
    "base/inflate.cpp",
    *(f"cuda/{name}.cpp" for name in ("device", "driver", "graph", "kernel_archive", "memory", "module", "stream")),
)
NATIVE = REPOSITORY / "tests/unit/native"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("cuda_driver", SOURCES, tmp_path_factory.mktemp("cuda_driver"))


@pytest.fixture(scope="module")
def fake(program: Path) -> Path:
    return _shared_library(NATIVE / "fake_libcuda.cpp", program.parent / "libcuda_fake.so")


def _shared_library(source: Path, path: Path) -> Path:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, "-std=c++20", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return path


@pytest.fixture
def run(program: Path, fake: Path) -> Run:
    def call(*arguments: str, library: str = "", **settings: int) -> subprocess.CompletedProcess[str]:
        text = ",".join(f"{name}={value}" for name, value in settings.items())
        environment = {**os.environ, "FAKE_CUDA": text}
        command = [str(program), library or str(fake), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    return call


def archive(folder: Path, *, cubin: bytes = b"\x7fELF machine code", ptx: bytes = b".version 8.4") -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<I", len(value)) + value.encode()

    def data(raw: bytes) -> bytes:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = packer.compress(raw) + packer.flush()
        return struct.pack("<II", len(raw), len(packed)) + packed

    parts = [b"V100KRN1", text("any"), text("nvrtc 12.4"), struct.pack("<I", 1), text("unit"), data(cubin), data(ptx)]
    (folder / "kernels.archive").write_bytes(b"".join(parts))
    return folder


def error_of(done: subprocess.CompletedProcess[str], kind: str = "DeviceError") -> str:
    """The one line of the error."""
    assert done.returncode == 1, done
    assert done.stdout.count("\n") == 1, done.stdout
    assert done.stdout.startswith(f"{kind}: "), done.stdout
    return done.stdout.removeprefix(f"{kind}: ").strip()


def test_a_machine_without_driver_is_told_so_in_one_line(run: Run) -> None:
    message = error_of(run("list", library="libcuda_that_is_not_there.so.1"))
    assert message.startswith("no NVIDIA driver: libcuda_that_is_not_there.so.1 cannot be loaded (")


def test_another_library_under_the_name_is_no_driver(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").write_text("int unrelated() { return 0; }\n")
    library = _shared_library(tmp_path / "empty.cpp", tmp_path / "libcuda.so.1")
    assert error_of(run("list", library=str(library))) == f"{library} is not a CUDA driver: it lacks cuInit"


def test_an_old_driver_is_refused_with_its_version_and_the_one_needed(run: Run) -> None:
    message = error_of(run("list", version=11040))
    assert message == "the NVIDIA driver is too old: it offers CUDA 11.4, needed is driver 525 (CUDA 12.0) or newer"


def test_a_driver_that_lacks_a_function_is_too_old(run: Run, tmp_path: Path) -> None:
    text = (NATIVE / "fake_libcuda.cpp").read_text().replace("cuGraphInstantiateWithFlags", "cuGraphInstantiate")
    (tmp_path / "older.cpp").write_text(text)
    library = _shared_library(tmp_path / "older.cpp", tmp_path / "libcuda.so.1")
    assert "and lacks cuGraphInstantiateWithFlags, needed is" in error_of(run("list", library=str(library)))


def test_a_driver_without_device_is_told_so(run: Run) -> None:
    assert error_of(run("list", init=100)) == "the NVIDIA driver sees no device"


def test_other_failures_carry_the_words_of_the_driver(run: Run) -> None:
    message = error_of(run("list", init=999))
    assert message == "starting the NVIDIA driver: no description (unknown error, 999)"


def test_devices_are_listed_with_capability_memory_ecc_and_peers(run: Run) -> None:
    lines = run("list", count=3).stdout.splitlines()
    assert lines[0] == "driver 12.4"
    assert lines[2] == "CUDA1 Fake V100 1 0004:01:00.0 sm7.0 80 SMs 16384 MiB ecc=1 shared=98304 peers 0 2"
    assert len(lines) == 4


def test_a_card_below_volta_is_refused_by_name(run: Run) -> None:
    message = error_of(run("copies", capability=60))
    assert message == "CUDA0 (Fake V100 0) has compute capability 6.0; 7.0 or newer is needed"


@pytest.mark.parametrize("ordinal", ["-1", "2"])
def test_a_device_that_is_not_there_is_refused(run: Run, ordinal: str) -> None:
    assert error_of(run("ordinal", ordinal)) == f"device CUDA{ordinal} is not there; the driver sees 2"


def test_want_of_memory_says_what_was_asked_for_and_what_is_free(run: Run) -> None:
    message = error_of(run("memory", str(3 << 20), free=1 << 20), "OutOfMemory")
    assert message == "CUDA0: 3 MiB of device memory asked for, 1 MiB are free"


def test_everything_that_is_made_is_released(run: Run) -> None:
    for case in ("memory 4096", "copies", "graphs"):
        done = run(*case.split())
        assert done.returncode == 0, done
        calls = done.stderr.split()
        pairs = {
            "cuMemAlloc": "cuMemFree",
            "cuMemHostAlloc": "cuMemFreeHost",
            "cuStreamCreate": "cuStreamDestroy",
            "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
            "cuGraphInstantiate": "cuGraphExecDestroy",
            "cuStreamEndCapture": "cuGraphDestroy",
        }
        for made, released in pairs.items():
            assert calls.count(made) == calls.count(released), f"{case}: {made}"


def test_copies_arrive(run: Run) -> None:
    assert run("copies").stdout == "there and back\n"


def test_a_failed_copy_names_device_and_deed(run: Run) -> None:
    message = error_of(run("copies", cuMemcpyHtoDAsync=218))
    assert message == "CUDA0: copying to the device: a PTX JIT compilation failed (CUDA_ERROR_INVALID_PTX, 218)"


def test_a_volta_card_gets_the_cubin_and_a_newer_one_the_ptx(run: Run, tmp_path: Path) -> None:
    archive(tmp_path)
    assert "cuModuleLoadDataEx cubin" in run("launches", str(tmp_path)).stderr
    assert "cuModuleLoadDataEx .version 8.4" in run("launches", str(tmp_path), capability=90).stderr


def test_a_newer_card_needs_a_driver_that_knows_the_ptx(run: Run, tmp_path: Path) -> None:
    message = error_of(run("launches", str(archive(tmp_path)), capability=90, version=12020))
    assert "needs driver 550 (CUDA 12.4) or newer" in message
    assert "this one offers CUDA 12.2" in message


def test_launches_pass_grid_parameters_and_shared_memory(run: Run, tmp_path: Path) -> None:
    lines = run("launches", str(archive(tmp_path))).stderr.splitlines()
    assert "cuLaunchKernel 3 2 1 x 256 shared 1024 first 7" in lines
    assert "cuFuncSetAttribute 8 98304" in lines
    assert not any("first 8" in line for line in lines), "an empty grid is not launched"


def test_a_unit_that_does_not_load_shows_the_compilers_log(run: Run, tmp_path: Path) -> None:
    message = error_of(run("launches", str(archive(tmp_path)), cuModuleLoadDataEx=218))
    assert message.startswith("CUDA0: loading kernel unit 'unit' [line 7: bad instruction]: a PTX JIT")


def test_a_failed_launch_is_reported_under_the_kernels_name(run: Run, tmp_path: Path) -> None:
    message = error_of(run("launches", str(archive(tmp_path)), cuLaunchKernel=2), "OutOfMemory")
    assert message.startswith("CUDA0: launching unit/k: out of memory")


def test_a_missing_kernel_is_named(run: Run, tmp_path: Path) -> None:
    assert "finding kernel unit/k" in error_of(run("launches", str(archive(tmp_path)), cuModuleGetFunction=500))


def test_graphs_are_recorded_once_per_key_and_the_oldest_makes_room(run: Run) -> None:
    done = run("graphs")
    assert done.stdout.splitlines() == [
        "3 nodes, 3 recorded, 2 kept",
        "4 recorded",
        "passed on: from inside",
    ]
    assert done.stderr.split().count("cuGraphLaunch") == 7
    assert done.stderr.split().count("cuStreamEndCapture") == 5, "a recording that throws is ended too"


def test_archives_of_any_content_are_unpacked(run: Run, tmp_path: Path) -> None:
    source = random.Random(5)
    cubin = bytes(source.choices(range(256), k=70_000)) + b"abc" * 30_000 + bytes(source.choices(b"abcd", k=50_000))
    done = run("archive", str(archive(tmp_path, cubin=cubin)))
    assert done.stdout == f"nvrtc 12.4 unit {len(cubin)} 13 .version 8.4\n"


def test_damaged_archives_are_refused_without_a_crash(run: Run, tmp_path: Path) -> None:
    source = random.Random(7)
    whole = (archive(tmp_path, cubin=bytes(source.choices(b"abcdef", k=3000))) / "kernels.archive").read_bytes()
    for trial in range(40):
        damaged = bytearray(whole)
        if trial % 2:
            del damaged[source.randrange(8, len(damaged)) :]
        else:
            for _ in range(3):
                damaged[source.randrange(8, len(damaged))] ^= 1 << source.randrange(8)
        (tmp_path / "kernels.archive").write_bytes(damaged)
        done = run("archive", str(tmp_path))
        assert done.returncode in (0, 1), (trial, done)  # a flipped bit may hit a name or a literal
        assert done.returncode == 0 or error_of(done)
    (tmp_path / "kernels.archive").write_bytes(b"something else entirely")
    assert error_of(run("archive", str(tmp_path))).endswith("not a kernel archive")


def test_the_device_list_shows_cuda_devices_and_why_one_cannot_be_used(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(fake)
    code = "from pyllama.tools.devices import device_list; print(device_list())"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_CUDA": "count=1,capability=60"}
    command = [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[1].startswith("  CPU: ")
    assert lines[2].startswith("  CUDA0: Fake V100 0 (16384 MiB, 0 MiB free), compute capability 6.0, 80 SMs, 0004:0")
    assert "cannot be used: CUDA0 (Fake V100 0) has compute capability 6.0" in lines[2]
    assert lines[3].startswith("  CUDA kernels: ")


def test_a_folder_without_archive_is_named(run: Run, tmp_path: Path) -> None:
    assert f"{tmp_path}/kernels.archive: cannot be opened" in error_of(run("archive", str(tmp_path)))
