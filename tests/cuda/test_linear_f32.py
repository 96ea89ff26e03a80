"""Matrices of plain floats: the kernels of `linear_f32.cu`, embeddings of f32, and bf16 on its way to f16.

Tolerance of f32 products: a product passes through at most `steps` roundings of the fixed order of sums, each 2^-24 of
what has been summed up to there, which is at most the sum of the products' sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from support.cuda_device import Array, Device, linear_job, parameter_structs
from support.cuda_experts import group_slots, pack_stack, run_experts
from support.cuda_linear import Job, Weight, make_panel, run_linear

THREADS = 256
ROWS = (1, 2, 7, 8, 9, 17, 64, 100)
SIZES = ((1, 1), (7, 3), (64, 48), (130, 5), (2048, 17), (1023, 33), (5120, 9))  # in_features, out_features
KERNELS = {"rows8": (8, 4), "rows16": (16, 16)}  # rows and features of a block


def run_f32(device: Device, kernel: str, x: NDArray[np.float32], jobs: Sequence[dict[str, object]]) -> None:
    """One launch; a job is the fields of LinearJob but for its tiles, its weight an Array [out, in]."""
    rows, features = x.shape
    structs, tiles = parameter_structs()["LinearF32Params"]().job, 0
    rows_of_block, features_of_block = KERNELS[kernel]
    for i, job in enumerate(jobs):
        weight = job["weight"]
        assert isinstance(weight, Array)
        fields = {"scale": 1.0} | job | {"out_features": weight.shape[0], "first_tile": tiles}
        structs[i] = linear_job(**fields)
        tiles += -(-weight.shape[0] // features_of_block)
    device.kernel("linear_f32", kernel)(
        (tiles, -(-rows // rows_of_block)), THREADS, "LinearF32Params", x=device.put(x), rows=rows,
        in_features=features, jobs=len(jobs), job=structs,
    )  # fmt: skip
    device.synchronize()  # x is freed here


def product(device: Device, kernel: str, x: NDArray[np.float32], w: Array) -> NDArray[np.float32]:
    y = device.empty((len(x), w.shape[0]))
    run_f32(device, kernel, x, [{"weight": w, "y": y}])
    return y.get()


def assert_close(y: NDArray[np.float32], x: NDArray[np.float32], w: NDArray[np.float32]) -> None:
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    steps = 4 * -(-x.shape[1] // 1024) + 8 + 5 + 1
    allowed = 2.0**-24 * steps * (np.abs(wide_x) @ np.abs(wide_w).T)
    off = np.abs(y - wide_x @ wide_w.T) - allowed
    assert off.max() <= 0, (
        f"off by {off.max():.2e} more than the roundings at {np.unravel_index(off.argmax(), y.shape)}"
    )


def activations(rows: int, features: int, source: np.random.Generator) -> NDArray[np.float32]:
    return (source.standard_normal((rows, features)) * 10.0 ** source.uniform(-6, 6, (rows, 1))).astype(np.float32)


@pytest.mark.parametrize(("features", "out_features"), SIZES)
def test_products_match_float64_and_a_row_has_one_result(device: Device, features: int, out_features: int) -> None:
    source = np.random.default_rng(features)
    w = source.standard_normal((out_features, features)).astype(np.float32)
    x = activations(ROWS[-1], features, source)
    weight = device.put(w)
    together = product(device, "rows16", x, weight)
    assert_close(together, x, w)
    for rows in ROWS:
        for kernel in KERNELS:
            y = product(device, kernel, x[:rows], weight)
            assert np.array_equal(y.view(np.uint32), together[:rows].view(np.uint32)), (rows, kernel)
    last = product(device, "rows8", x[-1:], weight)
    assert np.array_equal(last[0].view(np.uint32), together[-1].view(np.uint32))


def test_a_fault_in_one_weight_is_seen(device: Device) -> None:
    source = np.random.default_rng(1)
    w, x = source.standard_normal((20, 512)).astype(np.float32), activations(3, 512, source)
    faulty = w.copy()
    faulty[13, 200] *= 1.01
    with pytest.raises(AssertionError):
        assert_close(product(device, "rows8", x, device.put(faulty)), x, w)


@pytest.mark.parametrize("kernel", KERNELS)
def test_several_matrices_in_one_launch_have_bias_scale_and_sums_of_their_own(device: Device, kernel: str) -> None:
    source = np.random.default_rng(4)
    features, rows = 96, 19
    x = activations(rows, features, source)
    weights = [device.put(source.standard_normal((n, features)).astype(np.float32)) for n in (48, 1, 17)]
    plain = [product(device, "rows8", x, weight) for weight in weights]
    bias, before = (source.standard_normal(n).astype(np.float32) for n in ((1,), (rows, 17)))
    outputs = [device.empty((rows, 48)), device.empty((rows, 1)), device.put(before)]
    device_bias = device.put(bias)
    run_f32(device, kernel, x, [
        {"weight": weights[0], "y": outputs[0]},
        {"weight": weights[1], "y": outputs[1], "bias": device_bias, "scale": 0.37},
        {"weight": weights[2], "y": outputs[2], "adds": 1},
    ])  # fmt: skip
    assert np.array_equal(outputs[0].get(), plain[0])
    assert np.array_equal(outputs[1].get(), plain[1] * np.float32(0.37) + bias)
    assert np.array_equal(outputs[2].get(), before + plain[2])


@pytest.mark.parametrize("rows_of_item", [8, 16])
def test_experts_of_f32_have_the_bits_of_their_matrices_alone(device: Device, rows_of_item: int) -> None:
    source = np.random.default_rng(rows_of_item)
    experts, used, rows, features = 6, 2, 45, 100
    matrices = [source.standard_normal((21, features)).astype(np.float32) for _ in range(experts)]
    here = [None if e == 4 else w for e, w in enumerate(matrices)]
    stack = pack_stack(device, "F32", here, features, scales=[1.0, 2.0, 0.5, 1.0, 1.0, 4.0])
    expert = np.argsort(source.random((rows, experts)), axis=1)[:, :used].astype(np.int32)
    expert[:40, 0] = 5
    expert[:40, 1] = 0
    for slots_per_row in (used, 1):
        x = activations(rows * used // slots_per_row, features, source)
        y = run_experts(
            device, device.put(x), group_slots(device, expert, experts, rows_of_item), [stack], slots_per_row
        )
        scales = (1, 2, 0.5, 1, 0, 4)
        expected = np.empty((rows * used, 21), np.float32)
        for slot, e in enumerate(expert.ravel()):
            row = slot // slots_per_row
            expected[slot] = product(device, "rows8", x[row : row + 1], device.put(matrices[e]))[0] * scales[e]
        assert np.array_equal(y.get(), expected)


def test_embeddings_of_f32_are_rows_of_the_table(device: Device) -> None:
    table = np.random.default_rng(3).standard_normal((50, 100)).astype(np.float32)
    tokens, y = np.array([0, 49, 7, 7], np.int32), device.empty((4, 100))
    device.kernel("rows", "gather_rows")(
        4, THREADS, "GatherRowsParams", x=device.put(table), indices=device.put(tokens), y=y, rows=4, features=100
    )
    assert np.array_equal(y.get(), table[tokens])


# --- bf16 ------------------------------------------------------------------------------------------------------------


def bf16_bits(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Cut off, which is a bf16 value all the same."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_exponent(largest: int) -> int:
    """As in params.h."""
    return 0 if largest == 0 else min(14 + 127 - (largest >> 7), 126)


def largest_of(device: Device, bits: NDArray[np.uint16]) -> int:
    blocks = 5
    found = device.empty((blocks,), np.uint32)
    device.kernel("repack", "largest_BF16")(
        blocks, THREADS, "LargestParams", values=device.put(bits), largest=found, n=bits.size
    )
    return int(found.get().max())


def pack_bf16(device: Device, bits: NDArray[np.uint16], exponent: int) -> Weight:
    rows, features = bits.shape
    packed = device.empty((-(-rows // 32) * features * 64,), np.uint8)
    packed.fill(0)
    device.kernel("repack", "repack_BF16")(
        -(-rows * (features // 32) // THREADS), THREADS, "RepackParams", rows=device.put(bits), packed=packed,
        out_features=rows, blocks=features // 32, exponent=exponent,
    )  # fmt: skip
    device.synchronize()  # the rows are freed here
    return Weight("F16", packed, rows, features)


@pytest.mark.parametrize("size", [1.0, 1e30, 3e38, 1e-30, 1e-38, 1e-41])
def test_bf16_of_any_size_becomes_f16_with_a_scale(device: Device, size: float) -> None:
    source = np.random.default_rng(8)
    raw = source.standard_normal((70, 96))
    bits = bf16_bits(raw / np.abs(raw).max() * size)
    largest = largest_of(device, bits)
    assert largest == int((bits & 0x7FFF).max())
    exponent = bf16_exponent(largest)
    weight = pack_bf16(device, bits, exponent)
    wide = bf16_values(bits)
    x = (source.standard_normal((5, 96)) * 0.03).astype(np.float32)  # products of the largest stay within f32
    y = device.empty((5, 70))
    run_linear(device, make_panel(device, device.put(x)), [Job(weight, y, scale=2.0**-exponent)])
    expected, scale = x @ wide.T, np.sqrt((x.astype(np.float64) ** 2) @ (wide**2).T)
    assert (np.abs(y.get() - expected) <= 2e-3 * scale + 2.0**-149).all()


def test_bf16_embeddings_keep_every_bit_down_to_a_billionth_of_the_largest(device: Device) -> None:
    source = np.random.default_rng(12)
    bits = bf16_bits(source.standard_normal((40, 64)) * 2.0 ** source.integers(-27, 1, (40, 64)) * 1e20)
    exponent = bf16_exponent(largest_of(device, bits))
    weight, y = pack_bf16(device, bits, exponent), device.empty((3, 64))
    tokens = np.array([39, 0, 33], np.int32)
    device.kernel("embed_f16", "embed")(
        (3, 1), THREADS, "EmbedParams", table=weight.packed, tokens=device.put(tokens), y=y, rows=3, features=64,
        exponent=-exponent,
    )  # fmt: skip
    wide = bf16_values(bits)
    kept = np.abs(wide) >= np.abs(wide).max() * 2.0**-31
    assert np.array_equal(y.get()[kept[tokens]], wide[tokens][kept[tokens]])
    assert kept.mean() > 0.98


def test_infinities_and_nan_do_not_set_the_scale_of_a_bf16_matrix(device: Device) -> None:
    bits = bf16_bits(np.linspace(-2, 2, 300))
    bits[7], bits[200] = 0x7F80, 0xFFC1
    assert largest_of(device, bits) == 0x4000
