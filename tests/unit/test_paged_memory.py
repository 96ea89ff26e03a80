"""Paged memory against a plain list model, in a C++ driver built here with the sanitizers where the compiler has them.

The driver (native/paged_memory_driver.cpp) writes a number per token into simulated pages and compares all of it after
every operation. What pages mean to attention is covered by the engine's tests.
"""

import subprocess
from pathlib import Path

import pytest
from unit.native_build import build_driver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("paged_memory_driver", ["memory/paged_memory.cpp"], tmp_path_factory.mktemp("paged_memory"))


def run(driver: Path, *arguments: str) -> None:
    result = subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(arguments)}: exit status {result.returncode}\n{result.stderr}"


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_random_operations_equal_a_list_model(driver: Path, seed: int) -> None:
    run(driver, "random", str(seed), "1500")


def test_a_shared_partly_filled_page_is_copied_before_it_is_written(driver: Path) -> None:
    run(driver, "copy_on_write")


def test_an_append_that_lacks_pages_throws_and_changes_nothing(driver: Path) -> None:
    run(driver, "full")


def test_append_then_truncate_restores_tokens_and_page_count(driver: Path) -> None:
    run(driver, "rollback")


def test_forgotten_pages_are_free_and_stay_forgotten(driver: Path) -> None:
    run(driver, "forgetting")


def test_bad_sequences_and_counts_are_invalid_arguments(driver: Path) -> None:
    run(driver, "invalid")


def test_the_driver_refuses_an_unknown_case(driver: Path) -> None:
    """Guards the tests above against passing because a case name was misspelt."""
    assert subprocess.run([driver, "no such case"], capture_output=True).returncode == 2
