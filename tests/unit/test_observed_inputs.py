"""Statistics of linear weights' inputs: against NumPy, whatever the threads and batches, at no change of a logit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, InputSums, Model, backend_info
from support.llama_forward import linear_inputs
from support.logits import assert_same_bits
from support.tiny_llama import write_tiny_llama

N_TOKENS = 48


def tokens() -> np.ndarray:
    return np.random.default_rng(7).integers(3, 290, N_TOKENS).astype(np.int32)


def observe(path: Path, *, collect: bool = True, isa: str = "auto", pieces: int = 1, **settings: object):
    """(statistics, logits of every row) of one text, decoded in equal pieces."""
    model = Model(path, isa=isa)
    engine = Engine(
        model, n_ctx=N_TOKENS, n_batch=N_TOKENS, type_k="f32", type_v="f32", collect_importance=collect, **settings
    )
    logits = []
    for piece in np.split(tokens(), pieces):
        engine.decode(piece, logits=[True] * len(piece))
        logits.append(engine.logits())
    statistics = engine.importance()
    engine.close()
    model.close()
    return statistics, np.concatenate(logits)


def assert_same_sums(found: dict[str, InputSums], expected: dict[str, InputSums]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert (found[name].squares == expected[name].squares).all(), name
        assert (found[name].n_rows == expected[name].n_rows).all(), name


@pytest.mark.parametrize("isa", ["reference", backend_info()["isa"]])
def test_sums_are_those_of_the_inputs_of_every_weight(tiny_llama_path: Path, isa: str) -> None:
    statistics, _ = observe(tiny_llama_path, isa=isa)
    expected = linear_inputs(tiny_llama_path, tokens())
    assert statistics.keys() == expected.keys()
    for name, inputs in expected.items():
        squares, n_rows = statistics[name]
        assert squares.shape == (1, inputs.shape[1]), name
        assert n_rows.tolist() == [N_TOKENS], name
        np.testing.assert_allclose(squares[0], np.square(inputs).sum(axis=0), rtol=1e-3, err_msg=name)


def test_logits_are_the_same_bits_with_and_without(tiny_llama_path: Path) -> None:
    (statistics, with_it), (nothing, without) = observe(tiny_llama_path), observe(tiny_llama_path, collect=False)
    assert_same_bits(with_it, without, "logits while collecting")
    assert statistics
    assert nothing == {}


def test_threads_and_batches_do_not_change_the_sums(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "q8_0.gguf", weight_type="q8_0")
    expected, _ = observe(path)
    assert_same_sums(observe(path, n_threads=1)[0], expected)
    assert_same_sums(observe(path, n_threads=3)[0], expected)
    assert_same_sums(observe(path, pieces=3)[0], expected)  # 3 x 16
    assert_same_sums(observe(path, n_ubatch=24)[0], expected)


def test_passes_of_fewer_than_16_rows_do_not_count(tiny_llama_path: Path) -> None:
    assert observe(tiny_llama_path, pieces=4)[0] == {}  # 4 x 12
    statistics, _ = observe(tiny_llama_path, n_ubatch=20)  # 20 + 20 + 8
    assert {int(entry.n_rows[0]) for entry in statistics.values()} == {40}


def test_rows_of_the_last_layer_count_where_their_logits_are_wanted(tiny_llama_path: Path) -> None:
    model = Model(tiny_llama_path)
    engine = Engine(model, n_ctx=N_TOKENS, collect_importance=True)
    engine.decode(tokens(), logits=[i >= 20 for i in range(N_TOKENS)])
    n_rows = {name: int(entry.n_rows[0]) for name, entry in engine.importance().items()}
    engine.close()
    model.close()
    assert n_rows["blk.0.ffn_down.weight"] == n_rows["blk.1.attn_output.weight"] == N_TOKENS
    assert n_rows["blk.1.ffn_gate.weight"] == n_rows["blk.1.ffn_down.weight"] == n_rows["output.weight"] == 28


def test_a_fused_weight_counts_once_and_a_tied_output_has_the_embeddings_name(tmp_path: Path) -> None:
    fused, _ = observe(write_tiny_llama(tmp_path / "fused.gguf", fused_qkv=True))
    assert fused["blk.0.attn_qkv.weight"].n_rows.tolist() == [N_TOKENS]
    assert not [name for name in fused if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight"))]
    tied, _ = observe(write_tiny_llama(tmp_path / "tied.gguf", tied=True))
    assert "token_embd.weight" in tied
    assert "output.weight" not in tied
