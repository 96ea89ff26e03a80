"""Moves of rows and rectangles: exact, and nothing beside them is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.cuda_device import Device, wide_grid

THREADS = 256


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 1023), (130, 1025), (2, 5120)])
def test_a_rectangle_is_copied_and_its_surroundings_stay(device: Device, rows: int, columns: int) -> None:
    source = np.random.default_rng(columns)
    x = source.standard_normal((rows, columns + 7)).astype(np.float32)
    expected = source.standard_normal((rows + 1, columns + 12)).astype(np.float32)
    from_column, to_column = 3, 5
    y, values = device.put(expected), device.put(x)
    device.kernel("row_moves", "copy_columns")(
        wide_grid(rows, columns), THREADS, "CopyColumnsParams", x=values.address + 4 * from_column,
        y=y.address + 4 * to_column, from_stride=columns + 7, to_stride=columns + 12, rows=rows, columns=columns,
    )  # fmt: skip
    expected[:rows, to_column : to_column + columns] = x[:, from_column : from_column + columns]
    assert np.array_equal(y.get(), expected)


@pytest.mark.parametrize("n", [1, 255, 70_001])
def test_the_first_values_are_filled(device: Device, n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n + 9).astype(np.float32)
    x = device.put(values)
    device.kernel("row_moves", "fill")(3, THREADS, "FillParams", x=x, n=n, value=0.0)
    values[:n] = 0
    assert np.array_equal(x.get(), values)


@pytest.mark.parametrize("features", [1, 1000, 2560])
def test_previous_rows_come_from_the_sequence_or_its_record(device: Device, features: int) -> None:
    source = np.random.default_rng(features)
    counts, refused = [1, 5, 1, 3, 2], 2  # rows behind the sequences
    state_from, state_to = [2, 4, -1, -1, 0], [2, 1, 3, -1, 5]  # in place, moved, begun, not kept, moved
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows, gap = int(first[-1]) + refused, 11
    x = source.standard_normal((rows, features)).astype(np.float32)
    slots = source.standard_normal((6, features + gap)).astype(np.float32)
    sequence = np.repeat([*range(len(counts)), -1], [*counts, refused]).astype(np.int32)
    last, y = device.put(slots), device.empty((rows, features))
    device.kernel("row_moves", "previous_rows")(
        wide_grid(rows, features), THREADS, "PreviousRowsParams", x=device.put(x), y=y, last=last,
        sequence=device.put(sequence), first_row=device.put(first[:-1]), end_row=device.put(first[1:]),
        slot_values=features + gap, rows=rows,
        state_from=device.put(np.array(state_from, np.int32)), state_to=device.put(np.array(state_to, np.int32)),
        features=features,
    )  # fmt: skip
    expected, kept = np.concatenate((x[:1], x[:-1])), slots.copy()
    for s, begin in enumerate(first[:-1]):
        expected[begin] = slots[state_from[s], :features] if state_from[s] >= 0 else 0
        if state_to[s] >= 0:
            kept[state_to[s], :features] = x[first[s + 1] - 1]
    expected[-refused:] = np.nan
    assert np.array_equal(y.get(), expected, equal_nan=True)
    assert np.array_equal(last.get(), kept)


def test_a_vector_is_added_to_rows_and_scaled_rows_to_chosen_ones(device: Device) -> None:
    source = np.random.default_rng(8)
    for features in (1, 576, 3001):
        x, added = (source.standard_normal((7, features)).astype(np.float32) for _ in range(2))
        values = device.put(x)
        fields: dict[str, Any] = {"x": values, "rows": 7, "features": features}
        device.kernel("rows", "add_vector")(
            wide_grid(7, features), THREADS, "AddVectorParams", vector=device.put(added[0]), **fields
        )
        assert np.array_equal(values.get(), x + added[0])
        chosen, factors = np.array([6, 0, 3], np.int32), source.standard_normal(3).astype(np.float32)
        values = device.put(x)
        device.kernel("rows", "add_scaled_rows")(
            wide_grid(3, features), THREADS, "AddScaledRowsParams", x=values, added=device.put(added[:3]), rows=3,
            indices=device.put(chosen), factors=device.put(factors), features=features,
        )  # fmt: skip
        expected = x.astype(np.float64)
        expected[chosen] += factors[:, None].astype(np.float64) * added[:3]  # one rounding: the product is exact in f64
        assert np.array_equal(values.get(), expected.astype(np.float32))
