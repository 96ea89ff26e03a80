"""The emulated CUDA device itself: its language against numpy, and that it reports what a kernel may not do.

What kernels compute on it is tested in tests/cuda. A fault stays in a process, so faults are provoked in others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from unit.emulated_programs import UNIT, ProbeDevice
from unit.native_build import REPOSITORY

from compile_kernels import Unit
from support.cuda_device import Array
from support.emulated_cuda import BuildError, NoCompilerError
from support.emulated_cuda.build import build_units, host_source

SOURCE = REPOSITORY / "tests/unit/native/emulated_kernels.cu"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return build_units([Unit(UNIT, SOURCE, {}, None)])
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def device(folder: Path) -> ProbeDevice:
    return ProbeDevice(folder)


Apply = Callable[..., NDArray[np.uint32]]


@pytest.fixture
def apply(device: ProbeDevice) -> Apply:
    def call(what: int, a: NDArray[Any], b: NDArray[Any] | None = None, c: NDArray[Any] | None = None) -> Any:
        words = [
            np.zeros(len(a), np.uint32) if x is None else np.ascontiguousarray(x).view(np.uint32) for x in (a, b, c)
        ]
        y = device.empty((len(a),), np.uint32)
        fields = dict(zip("abc", map(device.put, words), strict=True))
        device.launch("intrinsics", -(-len(a) // 256), 256, **fields, y=y, n=len(a), what=what)
        return y.get()

    return call


def random_words(count: int, seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32)


def random_halves(count: int, seed: int) -> NDArray[np.uint32]:
    """Pairs of halves: any bits, and many of like size, whose sums need rounding."""
    source = np.random.default_rng(seed)
    plain = (source.standard_normal((count // 2, 2)) * 2.0 ** source.integers(-3, 4, (count // 2, 1))).astype(
        np.float16
    )
    return np.concatenate((random_words(count - count // 2, seed), plain.view(np.uint32)[:, 0]))


def assert_same_halves(found: NDArray[np.uint32], expected: NDArray[np.float16]) -> None:
    values = found.view(np.float16).reshape(-1, 2)
    same = (values.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(values) & np.isnan(expected))
    assert same.all(), f"{np.argwhere(~same)[0]}: {values[~same][0]!r} is not {expected[~same][0]!r}"


@pytest.mark.parametrize("what", range(4))
def test_halves_are_rounded_once_to_nearest_even(apply: Apply, what: int) -> None:
    words = [random_halves(200_000, seed) for seed in (1, 2, 3)]
    a, b, c = (word.view(np.float16).reshape(-1, 2).astype(np.float64) for word in words)
    with np.errstate(invalid="ignore", over="ignore"):
        # In f64 all of them are exact, but for sums whose smaller part is far below half an ulp of the larger.
        exact = (a + b, a - b, a * b, a * b + c)[what]
        assert_same_halves(apply(what, *words), exact.astype(np.float16))


def test_floats_become_halves_as_in_numpy_and_back(apply: Apply) -> None:
    bits = random_words(200_000, 4)
    bits[: 1 << 16] = np.arange(1 << 16, dtype=np.float32).view(np.uint32)  # integers, many of them halfway
    with np.errstate(over="ignore", invalid="ignore"):
        expected = bits.view(np.float32).astype(np.float16)
    pairs = np.stack([expected, np.zeros_like(expected)], axis=1)
    assert_same_halves(apply(4, bits), pairs)
    halves = np.arange(1 << 16, dtype=np.uint32)
    back = apply(5, halves).view(np.float32)
    assert np.array_equal(back, halves.astype(np.uint16).view(np.float16).astype(np.float32), equal_nan=True)


def test_bytes_and_bits_are_moved_as_documented(apply: Apply) -> None:
    a, b, c = (random_words(2000, seed) for seed in (5, 6, 7))
    wide = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)

    def permuted(x: int, selector: int) -> int:
        y = 0
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = x >> 8 * (nibble & 7) & 255
            y |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
        return y

    assert apply(6, a, b, c).tolist() == [permuted(int(x), int(s)) for x, s in zip(wide, c, strict=True)]
    assert np.array_equal(apply(7, a, b, c), (wide >> (c & np.uint32(31)).astype(np.uint64)).astype(np.uint32))
    lowest = a & random_words(2000, 8) & random_words(2000, 9)
    lowest[:3] = [0, 1, 1 << 31]
    assert apply(8, lowest).tolist() == [(int(x) & -int(x)).bit_length() for x in lowest]
    signed = [x.view(np.int8).reshape(-1, 4).astype(np.int64) for x in (a, b)]
    dot = (signed[0] * signed[1]).sum(axis=1) + c.view(np.int32)
    assert np.array_equal(apply(11, a, b, c), dot.astype(np.uint32))


def test_floats_become_the_nearest_integers(apply: Apply) -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.9, -2.9, 1e10, -1e10, np.inf, -np.inf, np.nan, 2147483520.0], np.float32)
    most, least = 2**31 - 1, -(2**31)
    nearest = [0, 2, 2, 0, -2, 3, -3, most, least, most, least, 0, 2147483520]
    cut = [0, 1, 2, 0, -1, 2, -2, most, least, most, least, 0, 2147483520]
    assert apply(9, x).view(np.int32).tolist() == nearest
    assert apply(10, x).view(np.int32).tolist() == cut


def test_the_tensor_instruction_multiplies_in_its_quadpairs(device: ProbeDevice) -> None:
    source = np.random.default_rng(10)
    tiles = 50
    a, b = (
        (source.standard_normal((tiles, 4, 8, 4)) * 10.0 ** source.uniform(-3, 2, (tiles, 4, 8, 1))).astype(np.float16)
        for _ in range(2)
    )
    c = source.standard_normal((tiles, 4, 8, 8)).astype(np.float32)
    y = device.empty(c.shape)
    device.launch("tensor", tiles, 32, a=device.put(a), b=device.put(b), c=device.put(c), y=y)
    products = np.einsum("tqrk,tqck->tqrck", a.astype(np.float64), b.astype(np.float64))
    expected = c + products.sum(axis=-1)
    size = np.abs(c) + np.abs(products).sum(axis=-1)
    assert (np.abs(y.get() - expected) <= 2.0**-24 * np.abs(expected) + 2.0**-48 * size).all()


def test_lanes_exchange_values(device: ProbeDevice) -> None:
    a = random_words(32, 11)
    y = device.empty((5, 32), np.uint32)
    device.launch("exchanges", 1, 32, a=device.put(a), y=y)
    lanes = np.arange(32)
    found = y.get()
    assert np.array_equal(found[0], a[lanes ^ 5])
    assert np.array_equal(found[1], a[lanes // 8 * 8 + 3])
    assert np.array_equal(found[2], a[np.where(lanes < 3, lanes, lanes - 3)])
    assert np.array_equal(found[3], a[np.where(lanes % 16 + 3 >= 16, lanes, lanes + 3)])
    votes = sum(int(x & 1) << i for i, x in enumerate(a))
    assert set(found[4, :8].tolist()) == {votes & 0xFF}
    assert set(found[4, 8:].tolist()) == {votes & 0xFFFFFF00}


def test_threads_meet_at_barriers(device: ProbeDevice) -> None:
    y = device.empty((64,), np.uint32)
    device.launch("rounds", 1, 64, y=y, n=50)
    assert np.array_equal(y.get(), np.full(64, sum(range(50 * 64)), np.uint32))


def test_memory_is_fresh_for_every_block(device: ProbeDevice) -> None:
    y = device.empty((40, 2), np.uint32)
    device.launch("fresh_shared", 40, 32, 128, y=y)
    assert (y.get() == 0xFFFFFFFF).all()
    array = Array(device, (1000,), np.float32)
    assert np.isnan(array.get()).all()


def run_alone(program: str, *arguments: str, **environment: str) -> Any:
    """What a program of emulated_programs.py finds, in a process of its own."""
    paths = os.pathsep.join(str(REPOSITORY / path) for path in ("tests", "scripts", "ggml_v100/cuda"))
    command = [sys.executable, "-m", "unit.emulated_programs", program, *arguments]
    all_of_it = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=all_of_it, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MISTAKES = {
    0: "no thread can go on: warp 0: lanes ffffffff wait in __syncthreads; warp 1: lanes 00000100 have returned, "
    "lanes fffffeff wait in __syncthreads; 1 of 64 threads have returned",
    1: "lanes ffff0000 have returned",
    2: "lanes meet in different places: warp 0: lanes 0000ffff wait in a shuffle of lanes ffffffff, lanes ffff0000 "
    "wait in a ballot of lanes ffffffff",
    3: "warp 0: lane 0 reads lane 20 in a shuffle of lanes 0000ffff",
    4: "thread 16 is not in its own mask 0000ffff",
    5: "lanes ffff0000 have returned, lanes 0000ffff wait in __syncwarp of lanes ffffffff",
    6: "a write 3 bytes after the end of dynamic shared memory",
    7: "something was written beside an allocation of 260 bytes",
    8: "thread 0 uses an address 1024 bytes after the end of an allocation of 256 bytes",
    9: "thread 0 uses a null, wild or misaligned address",
    10: "lanes 00000080 have returned",
    11: ": an address that is 4 modulo 16 is not aligned to 8 bytes",
    12: ": index 8 is outside of its array",
    13: ": a shift by 32 bits",
}


@pytest.mark.parametrize("what", sorted(MISTAKES))
def test_a_mistake_is_an_error_of_all_that_waits_afterwards(folder: Path, what: int) -> None:
    found = run_alone("mistake", str(folder), str(what))
    assert len(found) == (3 if what == 7 else 2), found
    for text in found:
        assert "emulated device: " in text, text
        assert MISTAKES[what] in text, text
        assert what == 7 or "mistakes, block (" in text
        if what > 10:  # checked by the compiler, which knows the line
            line = int(re.search(r"thread 0, emulated_kernels\.cu:(\d+): ", text)[1])
            assert {11: "uint2*", 12: "fixed[p.n]", 13: "<<="}[what] in SOURCE.read_text().splitlines()[line - 1]


def test_calls_that_a_driver_refuses_are_refused(folder: Path) -> None:
    found = run_alone("refused", str(folder), EMULATED_CUDA_DEVICES="2", EMULATED_CUDA_MEMORY_MIB="3")
    assert found == {
        "devices": 2,
        "a copy that is too long": 1,
        "a copy from elsewhere": 1,
        "too many threads": 1,
        "shared memory without opt-in": 1,
        "shared memory within": None,
        "no such kernel": 500,
        "too much memory": 2,
        "all memory": None,
        "free": None,
        "bytes": 3 << 20,
        "free again": 1,
        "memory while a graph is recorded": 900,
        "a kernel of another device": 201,
    }


@pytest.mark.parametrize("streams", ["eager", "lazy"])
def test_streams_do_their_work_in_order_and_graphs_replay_it(folder: Path, streams: str) -> None:
    found = run_alone("streams", str(folder), EMULATED_CUDA_STREAMS=streams)
    exchanged = [lane ^ 5 for lane in range(32)]
    assert found["before waiting"] == (exchanged if streams == "eager" else [0] * 32)
    assert found["after waiting"] == exchanged
    assert found["recorded"] == [0] * 32
    assert found["replayed"] == [100 + lane for lane in exchanged]


def test_a_kernel_that_takes_no_struct_is_refused_by_name() -> None:
    with pytest.raises(BuildError, match=r"does not take one struct: .*two_numbers"):
        host_source('extern "C" __global__ void __launch_bounds__(f(1, 2), 3) two_numbers(int a, int b) {}')


def test_what_does_not_compile_is_told_with_its_line(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text(SOURCE.read_text().replace("uint32_t y = 0;", "uint32_t y = nothing;"))
    line = source.read_text().splitlines().index("  uint32_t y = nothing;") + 1
    with pytest.raises(BuildError, match=f"broken.cu:{line}:.*nothing"):
        build_units([Unit("broken", source, {}, None)])
