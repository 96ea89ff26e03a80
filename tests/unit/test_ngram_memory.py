"""The n-gram memory of `qwen4exp`: which rows of its table the tokens name, and that no others are ever read."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from unit.native_build import build_driver

from pyllama._engine import Engine, Model
from pyllama.errors import ModelError
from support.logits import position_logits
from support.qwen4exp_forward import Qwen4ExpForward, ngram_rows
from support.tiny_qwen4exp import NgramMemory, TinyQwen4Exp, add_sparse_table, write_tiny_qwen4exp

# The released model's.
EOS = 248044
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
SIZES = (
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
)  # fmt: skip
N_ROWS = 320001536
OFFSETS = [sum(SIZES[:head]) for head in range(len(SIZES))]
KNOWN_ROWS = {
    ((1, 2, 3), 0): [
        16121432, 28938500, 59087997, 73487090, 81148277, 104500129, 120276032, 149373875,
        176283436, 184305849, 216528839, 231080079, 257961536, 266068568, 289043455, 305959965,
    ],
    ((1, 2, 3), 2): [
        14605717, 24410875, 49313567, 72177428, 86060820, 104022010, 130963819, 146886202,
        161523077, 195939126, 219424565, 220811782, 248020141, 275228530, 284297999, 309645223,
    ],
    ((1, EOS, 3), 2): [
        5318554, 26730617, 51177670, 61593418, 94411889, 119482836, 127837362, 140373362,
        175277381, 199452204, 217186100, 238911097, 253868456, 270051525, 282384981, 306094789,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver("ngram_hash_driver", ["model/ngram_hash.cpp"], tmp_path_factory.mktemp("ngram_hash"))


def engine_rows(
    driver: Path, tokens: list[int], ngram_size: int, eos: int, multipliers: list[int], sizes: list[int]
) -> list[list[int]]:
    offsets = [sum(sizes[:head]) for head in range(len(sizes))]
    lists = [",".join(map(str, values)) for values in (multipliers, offsets, sizes, tokens)]
    command = [str(driver), str(ngram_size), str(len(sizes) // (ngram_size - 1)), str(eos), *lists]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[int(row) for row in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("tokens", "position"), KNOWN_ROWS)
def test_rows_of_the_released_model(driver: Path, tokens: tuple[int, ...], position: int) -> None:
    rows = engine_rows(driver, list(tokens), 3, EOS, list(MULTIPLIERS), list(SIZES))
    assert rows[position] == KNOWN_ROWS[tokens, position]


@pytest.mark.parametrize("ngram_size", [2, 3, 5, 8])
def test_rows_of_any_ngram_size_wrap_around_in_64_bits(driver: Path, ngram_size: int) -> None:
    rng = np.random.default_rng(ngram_size)
    multipliers = [int(value) for value in rng.integers(1 << 40, 1 << 62, ngram_size)]
    sizes = [int(value) for value in rng.integers(2, 1 << 24, 3 * (ngram_size - 1))]
    tokens = rng.integers(0, 6, 60).tolist()  # many of them eos
    expected = [
        ngram_rows(
            tokens,
            position,
            multipliers=multipliers,
            vocab_sizes=sizes,
            offsets=[sum(sizes[:head]) for head in range(len(sizes))],
            ngram_size=ngram_size,
            eos=3,
        )
        for position in range(len(tokens))
    ]
    assert engine_rows(driver, tokens, ngram_size, 3, multipliers, sizes) == expected


def mapped_bytes(path: Path) -> int:
    """Of the file, in this process's memory."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(int(re.search(r"\nRss: +(\d+) kB", part)[1]) * 1024 for part in maps if f"{path}\n" in part)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_table_larger_than_memory_costs_only_the_rows_that_are_read(tmp_path: Path) -> None:
    memory = NgramMemory(
        heads=8, multipliers=MULTIPLIERS, vocab_sizes=SIZES, table_rows=N_ROWS, row_features=160, eos=2
    )
    small = write_tiny_qwen4exp(tmp_path / "small.gguf", TinyQwen4Exp(memory=memory), table=False)
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, 290, 24).tolist()
    named = {
        row
        for position in range(len(tokens))
        for row in ngram_rows(
            tokens, position, multipliers=MULTIPLIERS, vocab_sizes=SIZES, offsets=OFFSETS, ngram_size=3, eos=2
        )
    }
    path = add_sparse_table(
        small, tmp_path / "large.gguf", N_ROWS, {row: rng.standard_normal(160, np.float32) for row in sorted(named)}
    )
    assert path.stat().st_size > 200e9
    begin = time.monotonic()
    model = Model(path, check_tensors=True)
    engine = Engine(model, n_ctx=256, type_k="f32", type_v="f32")
    assert time.monotonic() - begin < 10
    loaded = mapped_bytes(path)
    assert loaded < 2 << 20
    logits = position_logits(engine, tokens, chunk=7)
    page, pages_of_row = 4096, 2
    assert mapped_bytes(path) - loaded <= len(named) * pages_of_row * page
    expected = Qwen4ExpForward(path).logits(tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    engine.close()
    model.close()


def test_a_table_with_too_few_rows_is_refused(tmp_path: Path) -> None:
    memory = NgramMemory(table_rows=419)
    path = write_tiny_qwen4exp(tmp_path / "short.gguf", TinyQwen4Exp(memory=memory))
    with pytest.raises(ModelError, match=r"per_layer_token_embd\.weight has shape \[16, 419, 1, 1\].* at least 420"):
        Model(path)
