"""Threads of ranks and their meetings (native/ranks_driver.cpp): right sums, and an end within bounded time whatever a
rank does. Faults in a running engine are in tests/models/test_rank_faults.py.
"""

import subprocess
from pathlib import Path

import pytest
from unit.native_build import build_driver

SOURCES = [
    "parallel/collective.cpp",
    "parallel/rank_threads.cpp",
    "base/thread_pool.cpp",
    "base/thread_settings.cpp",
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("ranks_driver", SOURCES, tmp_path_factory.mktemp("ranks"))


def run(driver: Path, case: str) -> None:
    result = subprocess.run([driver, case], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{case}: exit status {result.returncode}\n{result.stderr}"


def test_sums_are_added_in_the_order_of_ranks_with_the_same_bits_everywhere(driver: Path) -> None:
    run(driver, "sums")


def test_a_broadcast_gives_everyone_the_data_of_its_root(driver: Path) -> None:
    run(driver, "broadcasts")


def test_a_rank_that_throws_ends_the_call_with_its_name_and_cause_and_the_next_call_works(driver: Path) -> None:
    run(driver, "throws")


def test_a_silent_rank_is_named_and_forgiven_when_it_comes_back(driver: Path) -> None:
    run(driver, "hangs_and_returns")


def test_a_lost_rank_ends_the_call_and_is_waited_for_by_nobody(driver: Path) -> None:
    run(driver, "hangs_for_long")


def test_a_lost_rank_that_comes_back_works_again(driver: Path) -> None:
    run(driver, "comes_back")


def test_a_slow_rank_that_shows_life_is_left_alone(driver: Path) -> None:
    run(driver, "slow_is_not_silent")


def test_ranks_at_different_meetings_are_an_error_not_a_wait(driver: Path) -> None:
    run(driver, "different_meetings")


def test_the_driver_refuses_an_unknown_case(driver: Path) -> None:
    """Guards the tests above against passing because a case name was misspelt."""
    assert subprocess.run([driver, "no such case"], capture_output=True).returncode == 2
