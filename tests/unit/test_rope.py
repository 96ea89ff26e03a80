"""Rotary angles through native/rope_driver.cpp against NumPy in f64: position channels, YaRN's corners, table values.

That models rotate with these angles is the subject of the oracle tests.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from unit.native_build import build_driver

QWEN35 = {"dimension": 64, "base": 1e7, "sections": (11, 11, 10, 0)}
Position = tuple[int, int, int, int]


@dataclass(frozen=True)
class Angles:
    magnitude: float
    frequency: NDArray[np.float64]
    channels: str  # a letter of "thwe" for each pair
    cosine: NDArray[np.float32]  # [rows, pairs]
    sine: NDArray[np.float32]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("rope_driver", ["model/rope.cpp"], tmp_path_factory.mktemp("rope"))


def angles_of(
    driver: Path,
    *,
    dimension: int,
    base: float,
    sections: Position = (0, 0, 0, 0),
    scaling: tuple[str, float] = ("none", 0.0),
    context: int = 262144,
    positions: list[Position] | None = None,
) -> Angles:
    arguments = [dimension, base, *scaling, context, *sections]
    rows = "\n".join(" ".join(map(str, position)) for position in positions or [])
    result = subprocess.run([driver, *map(str, arguments)], input=rows, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    first, *lines = result.stdout.splitlines()
    pairs = [line.split() for line in lines[: dimension // 2]]
    table = np.array([line.split() for line in lines[dimension // 2 :]], np.float32).reshape(-1, 2, dimension // 2)
    frequency = np.array([float(value) for value, _ in pairs])
    return Angles(float(first.split()[1]), frequency, "".join(name for _, name in pairs), table[:, 0], table[:, 1])


@pytest.mark.parametrize(
    ("dimension", "sections", "expected"),
    [
        (64, (11, 11, 10, 0), "thw" * 10 + "th"),
        # Shorter sections than pairs in turn: from pair 60 on, what would be height and width is `extra`.
        (128, (24, 20, 20, 0), "thw" * 20 + "teet"),
        (16, (3, 3, 2, 0), "thwthwth"),
        (12, (1, 1, 0, 0), "ththth"),  # shorter than the pairs: begins anew
        (12, (2, 0, 0, 4), "teetee"),
        (12, (0, 0, 0, 0), "tttttt"),
    ],
)
def test_channels_take_turns_within_their_sections(
    driver: Path, dimension: int, sections: Position, expected: str
) -> None:
    assert angles_of(driver, dimension=dimension, base=1e4, sections=sections).channels == expected


def test_text_positions_turn_as_without_sections(driver: Path) -> None:
    positions = [(p, p, p, 0) for p in (0, 1, 77, 4096, 262143)]
    plain = angles_of(driver, dimension=64, base=1e7, positions=positions)
    sectioned = angles_of(driver, **QWEN35, positions=positions)
    assert sectioned.channels != plain.channels
    np.testing.assert_array_equal(sectioned.cosine, plain.cosine)
    np.testing.assert_array_equal(sectioned.sine, plain.sine)


def test_a_patch_of_an_image_turns_each_pair_by_its_own_channel(driver: Path) -> None:
    positions = [(100, 100, 100, 0), (100, 100, 131, 0), (100, 117, 103, 0)]
    found = angles_of(driver, **QWEN35, positions=positions)
    frequency = 1e7 ** (-2.0 * np.arange(32) / 64)
    of_pair = np.array([[position["thwe".index(name)] for name in found.channels] for position in positions])
    np.testing.assert_allclose(found.frequency, frequency, rtol=1e-14)
    np.testing.assert_allclose(found.cosine, np.cos(of_pair * frequency), atol=1e-7)
    np.testing.assert_allclose(found.sine, np.sin(of_pair * frequency), atol=1e-7)
    text = "".join(name for name, same in zip(found.channels, of_pair[2] == of_pair[0], strict=True) if same)
    assert text == "t" * 11  # only time is shared with the image's first patch


@pytest.mark.parametrize(
    ("dimension", "base", "context", "low", "high"),
    [(64, 1e7, 262144, 14, 22), (128, 1e6, 32768, 23, 40)],  # Qwen3.5, Qwen3
)
def test_yarn_leaves_fast_pairs_and_stretches_slow_ones(
    driver: Path, dimension: int, base: float, context: int, low: int, high: int
) -> None:
    found = angles_of(driver, dimension=dimension, base=base, scaling=("yarn", 4.0), context=context)
    ratio = found.frequency / base ** (-2.0 * np.arange(dimension // 2) / dimension)
    np.testing.assert_allclose(ratio[: low + 1], 1.0, rtol=1e-14)
    np.testing.assert_allclose(ratio[high:], 0.25, rtol=1e-14)
    between = ratio[low : high + 1]
    np.testing.assert_allclose(np.diff(between), -0.75 / (high - low), rtol=1e-10)
    assert found.magnitude == pytest.approx(1.138629, abs=1e-6)
