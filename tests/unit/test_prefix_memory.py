"""Prefixes of sequences in live and in host memory against a plain model, in a C++ driver built with the sanitizers.

The driver (native/prefix_memory_driver.cpp) writes a hash of all tokens so far for every token of a page and into every
state, and compares them after each operation. What it means for logits is the subject of test_prefix_reuse.
"""

import subprocess
from pathlib import Path

import pytest
from unit.native_build import build_driver

SOURCES = [
    "memory/paged_memory.cpp",
    "memory/state_pool.cpp",
    "memory/prefix_cache.cpp",
    "memory/prefix_memory.cpp",
    "memory/saved_sequence.cpp",
    "tensor/buffer.cpp",
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("prefix_memory_driver", SOURCES, tmp_path_factory.mktemp("prefixes"))


def run(driver: Path, *arguments: str) -> None:
    result = subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(arguments)}: exit status {result.returncode}\n{result.stderr}"


# Even seeds have a recurrent state, those above 6 sliding windows; 1, 4 and 7 have room for a few entries.
@pytest.mark.parametrize("seed", [1, 2, 4, 5, 7, 8])
def test_random_operations_with_a_small_budget_and_failing_copies(driver: Path, seed: int) -> None:
    run(driver, "random", str(seed), "16000")


@pytest.mark.parametrize("seed", [3, 6, 9])
def test_with_memory_for_everything_exactly_the_longest_known_beginning_is_reused(driver: Path, seed: int) -> None:
    run(driver, "random", str(seed), "3000")


def test_the_least_recently_used_entry_makes_room(driver: Path) -> None:
    run(driver, "least_recently_used")


def test_an_entry_larger_than_the_budget_is_skipped_and_drops_nothing(driver: Path) -> None:
    run(driver, "too_large")


def test_checkpoints_are_kept_where_pages_are_not(driver: Path) -> None:
    run(driver, "states_without_pages")


def test_a_copy_that_fails_leaves_the_tree_whole(driver: Path) -> None:
    run(driver, "failing_fill")


def test_checkpoints_of_a_path_are_thinned_by_distance_from_the_newest(driver: Path) -> None:
    run(driver, "thinning")


def test_a_small_budget_keeps_the_newest_checkpoints_of_a_path(driver: Path) -> None:
    run(driver, "small_budget")


def test_bad_arguments_and_foreign_states_are_refused_with_the_reason(driver: Path) -> None:
    run(driver, "invalid")


def test_the_driver_refuses_an_unknown_case(driver: Path) -> None:
    """Guards the tests above against passing because a case name was misspelt."""
    assert subprocess.run([driver, "no such case"], capture_output=True).returncode == 2
