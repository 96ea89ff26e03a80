"""What is done to logits beside the choice of the largest: exact, compared with the same operations of numpy in f32."""

from __future__ import annotations

import numpy as np
import pytest

from support.cuda_device import Device

THREADS = 256


@pytest.mark.parametrize("n", [1, 257, 151_936])
def test_the_first_flaw_of_each_row_is_found(device: Device, n: int) -> None:
    logits = np.random.default_rng(n).standard_normal((4, n)).astype(np.float32)
    logits[1, [n // 3, n - 1]] = np.nan
    logits[2, [n // 2, n - 1]] = [np.inf, np.nan]
    logits[3, :] = -np.inf  # banned, not a flaw
    first = device.empty((4,), np.int32)
    first.fill(0x7F)
    device.kernel("sampling", "find_flaws")(
        (5, 4), THREADS, "FindFlawsParams", logits=device.put(logits), first=first, n=n
    )
    assert first.get().tolist() == [0x7F7F7F7F, n // 3, n // 2, 0x7F7F7F7F]


@pytest.mark.parametrize("n", [1, 31, 32, 33, 70_001])
def test_masks_ban_tokens_of_the_rows_that_have_one(device: Device, n: int) -> None:
    source = np.random.default_rng(n)
    logits = source.standard_normal((4, n)).astype(np.float32)
    masks = source.integers(0, 2**32, (2, -(-n // 32)), np.uint32)
    mask_of = np.array([1, -1, 0, 1], np.int32)
    found = device.put(logits)
    device.kernel("sampling", "mask_logits")(
        (3, 4), THREADS, "MaskLogitsParams", logits=found, masks=device.put(masks), mask_of=device.put(mask_of), n=n
    )
    expected = logits.copy()
    for row, mask in enumerate(mask_of):
        if mask >= 0:
            allowed = (masks[mask, np.arange(n) // 32] >> (np.arange(n) % 32).astype(np.uint32) & 1).astype(bool)
            expected[row, ~allowed] = -np.inf
    assert np.array_equal(found.get(), expected)


def test_single_columns_of_each_row(device: Device) -> None:
    source = np.random.default_rng(3)
    rows, n, listed = 3, 5000, 300
    x = source.standard_normal((rows, n)).astype(np.float32)
    columns = source.integers(-1, n, (rows, listed)).astype(np.int32)
    columns[:, :3] = [0, n - 1, -1]
    y = device.empty((rows, listed))
    device.kernel("sampling", "pick_columns")(
        rows, THREADS, "PickColumnsParams", x=device.put(x), columns=device.put(columns), y=y, n=n, listed=listed
    )
    assert np.array_equal(y.get(), np.where(columns < 0, 0, np.take_along_axis(x, columns.clip(0), axis=1)))
