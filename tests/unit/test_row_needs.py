"""What a sampler draws from the part of a row that it asks for, bit for bit what it draws from the whole row."""

import subprocess
from pathlib import Path

import pytest
from unit.native_build import build_driver

SOURCES = [f"sampling/{name}.cpp" for name in (
    "candidates", "dry", "infill", "penalties", "row_scan", "sampler", "steered_draw",
)]  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("row_needs_driver", SOURCES, tmp_path_factory.mktemp("row_needs"))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_part_of_the_row_gives_what_the_whole_row_gives(driver: Path, seed: int) -> None:
    result = subprocess.run([driver, str(seed), "600"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    counts = dict(line.split() for line in result.stdout.splitlines())
    assert int(counts["compared"]) > 1000
    assert int(counts["whole"]) > 500
