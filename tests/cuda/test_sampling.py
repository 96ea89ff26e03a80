"""What is done to logits before the largest are chosen: exact, compared with the same operations of numpy in f32."""

from __future__ import annotations

import numpy as np
import pytest

from support.cuda_device import Device

THREADS = 256
LARGEST = np.finfo(np.float32).max


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


def test_biases_come_before_penalties_and_every_step_is_rounded(device: Device) -> None:
    source = np.random.default_rng(3)
    n, listed = 5000, [0, 700, 1, 0, 300]
    logits = (source.standard_normal((len(listed), n)) * 8).astype(np.float32)
    penalties = np.array([(1, 0, 0), (1.1, 0.3, 0.7), (0.5, -1e38, 3e38), (2, 1, 1), (1.3, 0, -0.2)], np.float32)
    tokens = [np.sort(source.permutation(n)[:count]).astype(np.int32) for count in listed]
    biases = [np.where(source.random(c) < 0.5, source.standard_normal(c) * 5, 0).astype(np.float32) for c in listed]
    counts = [source.integers(0, 4, c).astype(np.int32) for c in listed]
    biases[1][:2], biases[4][0] = [-np.inf, LARGEST], -0.0
    logits[1, tokens[1][1]], counts[2][0] = LARGEST, 5  # sums that pass what f32 holds
    found = device.put(logits)
    device.kernel("sampling", "steer_logits")(
        len(listed), THREADS, "SteerLogitsParams", logits=found, n=n, penalties=device.put(penalties),
        first_token=device.put(np.concatenate(([0], np.cumsum(listed))).astype(np.int32)),
        tokens=device.put(np.concatenate(tokens)), biases=device.put(np.concatenate(biases)),
        counts=device.put(np.concatenate(counts)),
    )  # fmt: skip
    expected = logits.copy()

    def bounded(x: np.float32) -> np.float32:
        return np.clip(x, -LARGEST, LARGEST)

    with np.errstate(over="ignore"):
        for row in range(len(listed)):
            repeat, frequency, presence = penalties[row]
            for token, bias, count in zip(tokens[row], biases[row], counts[row], strict=True):
                logit = min(logits[row, token] + bias, LARGEST)
                if count > 0 and logit > -np.inf:
                    scaled = bounded(logit * repeat if logit <= 0 else logit / repeat)
                    logit = bounded(scaled - bounded(bounded(np.float32(count) * frequency) + presence))
                expected[row, token] = logit
    assert np.array_equal(found.get(), expected)
    assert np.isneginf(found.get()).sum() == 1
