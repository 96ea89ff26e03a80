"""Codecs that test_linear.py leaves out: every value of a matrix as `embed` decodes it, products of few and many rows.

The kernels are those of all types, so on the emulated device, where compiling them takes long, three types stand for
all: with two, four and eight units in a block, with and without a head.
Every operation on the way to a weight rounds to f16, so a weight is off by at most three times 2^-11 of itself; the
tolerance of products stands in `support.linear_rows`.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.cuda_device import Device
from support.cuda_linear import Job, make_panel, pack, run_linear, run_linear_prompt
from support.linear_rows import activations, assert_close
from support.random_blocks import RARE_TYPES, block_size, random_rows

EMULATED = "Emulated GPU"


@pytest.mark.parametrize("type_name", RARE_TYPES)
def test_every_weight_is_what_the_file_says(device: Device, type_name: str) -> None:
    features, rows = 3 * block_size(type_name)[0], 70
    raw, decoded = random_rows(type_name, rows, features, np.random.default_rng(sum(type_name.encode())))
    table, y = pack(device, type_name, raw, features), device.empty((rows, features))
    tokens = device.put(np.arange(rows, dtype=np.int32))
    device.kernel(f"embed_{type_name.lower()}", "embed")(
        (rows, 1), 256, "EmbedParams", table=table.packed, tokens=tokens, y=y, rows=rows, features=features
    )
    off = np.abs(y.get() - decoded)
    worst = np.unravel_index((off - 2.0**-9 * np.abs(decoded)).argmax(), off.shape)
    assert (off <= 1.5e-3 * np.abs(decoded) + 2.0**-24).all(), f"{worst}: {y.get()[worst]} for {decoded[worst]}"
    assert np.abs(decoded).max() > 0.005


@pytest.mark.parametrize("type_name", RARE_TYPES)
def test_products_match_float64_and_a_row_has_one_result(device: Device, type_name: str) -> None:
    if device.name == EMULATED and type_name not in ("NVFP4", "Q1_0", "IQ3_S"):
        pytest.skip("needs a card: three types stand for all on the emulated device")
    source = np.random.default_rng(sum(type_name.encode()))
    features, out_features = 9 * block_size(type_name)[0], 41
    raw, decoded = random_rows(type_name, out_features, features, source)
    weight = pack(device, type_name, raw, features)
    x = activations(65, features, source)
    together = device.empty((64, out_features))
    run_linear(device, make_panel(device, device.put(x[:64])), [Job(weight, together)])
    assert_close(together.get(), x[:64], decoded)
    for rows in (1, 8, 9, 17):
        y = device.empty((rows, out_features))
        run_linear(device, make_panel(device, device.put(x[:rows])), [Job(weight, y)])
        assert np.array_equal(y.get().view(np.uint32), together.get()[:rows].view(np.uint32)), rows
    prompt = device.empty((65, out_features))
    run_linear_prompt(device, make_panel(device, device.put(x), prompt=True), [Job(weight, prompt)], "narrow")
    assert_close(prompt.get(), x, decoded)
