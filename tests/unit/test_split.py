"""How a model is cut over ranks: arithmetic only, in a C++ driver (native/split_driver.cpp) that prints its answers.

The shapes are those of real models. That the cut models compute the same is the subject of tests/models/test_ranks.py.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from unit.native_build import build_driver

Range = tuple[int, int]

# Qwen3.8-27B: 16 attention and 48 delta-net layers, hidden 5120, 24 heads on 4 kv heads of 256, feed-forward 17408.
HIDDEN, FEATURES, VOCABULARY = 5120, 17408, 248320


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("split_driver", ["parallel/split.cpp"], tmp_path_factory.mktemp("split"))


def run(driver: Path, *arguments: object) -> list[list[str]]:
    done = subprocess.run([driver, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{arguments}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return [line.split() for line in done.stdout.splitlines()]


def parse_range(text: str) -> Range:
    begin, end = map(int, text.split(":"))
    return begin, end


def items(driver: Path, shares: str, n: int, per_unit: int = 1, times: int = 1) -> list[list[Range]]:
    return [[parse_range(word) for word in line] for line in run(driver, "items", shares, n, per_unit, times)]


@dataclass(frozen=True)
class Share:
    heads: Range
    kv_heads: Range
    group: int
    skew: int


def heads(
    driver: Path, shares: str, n_heads: int, n_kv: int, columns: int = 256, block: int = 32, times: int = 1
) -> list[list[Share]]:
    lines = run(driver, "heads", shares, n_heads, n_kv, columns, block, times)
    return [
        [
            Share(parse_range(line[i]), parse_range(line[i + 1]), int(line[i + 2]), int(line[i + 3]))
            for i in range(0, len(line), 4)
        ]
        for line in lines
    ]


def sizes(ranges: list[Range]) -> list[int]:
    return [end - begin for begin, end in ranges]


def equal_shares(n: int) -> str:
    return ",".join(["1"] * n)


def assert_covers(ranges: list[Range], n: int) -> None:
    assert ranges[0][0] == 0
    assert ranges[-1][1] == n
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize("shares", ["0.49,0.51", "1,1,1", "3,1", "1,2,3,4", "1,1,1,1,1", "0.05,0.95"])
@pytest.mark.parametrize("block", [32, 256])
def test_all_tensors_of_a_27b_model_together_come_within_a_percent_of_the_asked_shares(
    driver: Path, shares: str, block: int
) -> None:
    """K4. Bytes in units of a column of hidden size; a layer's rounding must not repeat in the next."""
    asked = [float(share) for share in shares.split(",")]
    bytes_of_rank = [0.0] * len(asked)
    cuts = (
        (items(driver, shares, FEATURES, block, times=64), 3.0),
        ([[s.kv_heads for s in line] for line in heads(driver, shares, 24, 4, block=block, times=16)], 256.0 * 20),
        (items(driver, shares, 16, 2 if block == 256 else 1, times=48), (10240 + 6144 * 2) / 16),
        (items(driver, shares, VOCABULARY, 32), 1.0),
    )
    for lines, weight in cuts:
        for line in lines:
            for rank, size in enumerate(sizes(line)):
                bytes_of_rank[rank] += size * weight
    # Three equal ranks keep two kv heads twice (see below); the query heads that weigh most are cut evenly.
    permitted = 0.03 if shares == "1,1,1" else 0.01
    for share, got in zip(asked, bytes_of_rank, strict=True):
        assert got / sum(bytes_of_rank) == pytest.approx(share / sum(asked), abs=permitted)


def test_rounding_that_repeats_would_miss_the_shares(driver: Path) -> None:
    """Negative control: 4 units at 0.4 to 0.6 are always 2 to 2 when each cut is rounded alone."""
    alone = [items(driver, "0.4,0.6", 4)[0] for _ in range(10)]
    assert sum(sizes(line)[0] for line in alone) == 20
    carried = items(driver, "0.4,0.6", 4, times=10)
    assert sum(sizes(line)[0] for line in carried) == 16


def test_cuts_of_unequal_weight_are_balanced_in_bytes(driver: Path) -> None:
    lines = run(driver, "weighted", "1,1,1", "1,3,1,1,3,5,1")
    totals = [0.0] * 3
    for weight, line in zip((1, 3, 1, 1, 3, 5, 1), lines, strict=True):
        for rank, word in enumerate(line):
            begin, end = parse_range(word)
            totals[rank] += weight * (end - begin)
    assert max(totals) - min(totals) <= 5


@pytest.mark.parametrize("n_ranks", range(1, 9))
@pytest.mark.parametrize("n_items", [1, 2, 4, 5, 16, 17, 128])
def test_every_item_has_one_rank_and_equal_shares_differ_by_one_unit(driver: Path, n_ranks: int, n_items: int) -> None:
    for line in items(driver, equal_shares(n_ranks), n_items, times=3):
        assert_covers(line, n_items)
        assert max(sizes(line)) - min(sizes(line)) <= 1


def test_a_share_of_zero_gets_nothing(driver: Path) -> None:
    for line in items(driver, "1,0,1,0", 17, times=5):
        assert sizes(line)[1] == sizes(line)[3] == 0
        assert_covers(line, 17)


def test_the_last_unit_may_be_short(driver: Path) -> None:
    assert items(driver, "1,1", 100, 32) == [[(0, 64), (64, 100)]]


@pytest.mark.parametrize(("n_ranks", "kv_heads"), [(2, [2, 2]), (4, [1, 1, 1, 1])])
def test_ranks_that_divide_the_kv_heads_get_whole_groups(driver: Path, n_ranks: int, kv_heads: list[int]) -> None:
    for line in heads(driver, equal_shares(n_ranks), 24, 4, times=3):
        assert [size for share in line for size in sizes([share.kv_heads])] == kv_heads
        assert [share.heads for share in line] == [(6 * s.kv_heads[0], 6 * s.kv_heads[1]) for s in line]
        assert {share.skew for share in line} == {0}


def test_three_ranks_share_24_heads_evenly_and_keep_some_kv_heads_twice(driver: Path) -> None:
    (line,) = heads(driver, equal_shares(3), 24, 4)
    assert line == [
        Share((0, 8), (0, 2), 6, 0),
        Share((8, 16), (1, 3), 6, 2),
        Share((16, 24), (2, 4), 6, 4),
    ]


def test_kv_heads_are_not_kept_twice_when_that_takes_more_of_them(driver: Path) -> None:
    """SmolLM2-360M: 15 heads on 5 kv heads; 5 query heads each would touch 2, 3 and 2 of them."""
    for line in heads(driver, equal_shares(3), 15, 5, columns=64, times=5):
        assert [share.skew for share in line] == [0, 0, 0]
        assert sum(sizes([share.kv_heads])[0] for share in line) == 5


@pytest.mark.parametrize("n_ranks", [5, 6, 8])
def test_more_ranks_than_kv_heads_leave_some_without(driver: Path, n_ranks: int) -> None:
    lines = heads(driver, equal_shares(n_ranks), 24, 4, times=16)
    for line in lines:
        assert sorted(sizes([share.kv_heads for share in line])) == [0] * (n_ranks - 4) + [1] * 4
        assert_covers([share.heads for share in line], 24)
    # Over all layers the caches come out even too.
    held = [sum(sizes([line[rank].kv_heads])[0] for line in lines) for rank in range(n_ranks)]
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize(
    ("n_heads", "n_kv", "columns", "block", "per_unit"),
    [(24, 4, 256, 256, 1), (8, 4, 64, 256, 2), (16, 8, 128, 256, 1), (4, 4, 128, 256, 2), (9, 3, 64, 256, 3)],
)
def test_heads_are_cut_where_the_blocks_of_the_output_weight_end(
    driver: Path, n_heads: int, n_kv: int, columns: int, block: int, per_unit: int
) -> None:
    for n_ranks in (2, 3, 4):
        for line in heads(driver, equal_shares(n_ranks), n_heads, n_kv, columns, block, times=2):
            for share in line:
                assert share.heads[0] * columns % block == 0 or share.heads[0] == share.heads[1]
                assert share.kv_heads[0] % per_unit == 0 or share.skew > 0


def test_units_are_the_least_number_of_items_that_fill_blocks(driver: Path) -> None:
    def unit(n_items: int, columns: int, block: int) -> int:
        return int(run(driver, "unit", n_items, columns, block)[0][0])

    assert unit(16, 128, 256) == 2
    assert unit(16, 128, 32) == 1
    assert unit(16, 96, 256) == 8
    assert unit(3, 128, 256) == 3  # cannot be cut
    assert unit(1, 7, 1) == 1


def test_value_heads_go_with_their_key_head(driver: Path) -> None:
    """27B: value head h reads key head h % 16."""

    def values(*arguments: int) -> list[Range]:
        lines = run(driver, "values", *arguments)
        return [parse_range(word) for line in lines for word in line]

    assert values(4, 7, 16, 48) == [(4, 7), (20, 23), (36, 39)]
    assert values(0, 16, 16, 48) == [(0, 48)]
    assert values(5, 5, 16, 48) == []
    owners = [h % 16 for begin, end in values(4, 7, 16, 48) for h in range(begin, end)]
    assert sorted(set(owners)) == [4, 5, 6]


def test_layers_are_contiguous_and_follow_the_shares(driver: Path) -> None:
    def layers(shares: str, n: int) -> list[Range]:
        return [parse_range(word) for word in run(driver, "layers", shares, n)[0]]

    assert layers("1,1", 64) == [(0, 32), (32, 64)]
    assert layers("3,1,0", 64) == [(0, 48), (48, 64), (64, 64)]
    assert layers("0,1,0,1", 3) == [(0, 0), (0, 2), (2, 2), (2, 3)]
    assert_covers(layers(equal_shares(8), 5), 5)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ("0,0", "all ranks are zero"),
        ("-1,2", "the share of a rank is -1"),
        ("nan,1", "the share of a rank is"),
        ("inf,1", "the share of a rank is"),
        (equal_shares(9), "expected 1 to 8"),
    ],
)
def test_shares_that_cannot_be_are_refused(driver: Path, shares: str, message: str) -> None:
    done = subprocess.run([driver, "items", shares, "4", "1", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert message in done.stdout


def test_the_driver_refuses_an_unknown_question(driver: Path) -> None:
    """Guards the tests above against passing because a name was misspelt."""
    assert subprocess.run([driver, "no such question"], capture_output=True).returncode == 2
