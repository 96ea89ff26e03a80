"""`qwen4exp` files that do not fit together: a ModelError naming the tensor or key. Multi-token prediction apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama._engine import Engine, Model
from pyllama.errors import ModelError
from support.logits import assert_same_bits, position_logits
from support.rewritten_gguf import ARRAY, U32, cut, rewrite, without
from support.tiny_qwen4exp import TinyQwen4Exp, write_tiny_qwen4exp

U64 = gguf.GGUFValueType.UINT64


def key(name: str, *value: Any) -> dict[str, Any]:
    """Changes for `rewrite`: another value of a key; None: without it."""
    return {"keys": {f"qwen4exp.{name}": None if value == (None,) else value}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen4exp(tmp_path_factory.mktemp("qwen4exp") / "model.gguf")


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen4exp(tmp_path_factory.mktemp("qwen4exp") / "mtp.gguf", TinyQwen4Exp(n_layer=2, mtp=True))


def refuse(source: Path, target: Path, changes: dict[str, Any], message: str, **arguments: Any) -> None:
    with pytest.raises(ModelError, match=message):
        Model(rewrite(source, target, architecture="qwen4exp", **changes), **arguments)


@pytest.mark.parametrize(
    "name",
    [
        "hyper_connection.count",
        "hyper_connection.low_rank",
        "attention.indexer.head_count",
        "attention.indexer.key_length",
        "attention.indexer.top_k",
        "ple.ngram_size",
        "ple.heads_per_ngram",
        "ple.conv_kernel",
        "ple.eos_token_id",
        "ple.layer_multipliers",
        "ple.head_offsets",
        "ple.head_vocab_sizes",
        "embedding_length_per_layer_input",
        "rope.dimension_sections",
        "ssm.state_size",
        "expert_count",
    ],
)
def test_a_missing_key_is_named(path: Path, tmp_path: Path, name: str) -> None:
    refuse(path, tmp_path / "bad.gguf", key(name, None), rf"qwen4exp\.{name}.* missing")


@pytest.mark.parametrize(
    "name",
    [
        "output_hc_norm.weight",
        "output_hc_down.weight",
        "output_hc_up.weight",
        "blk.0.hc_attn_inject.weight",
        "blk.1.hc_attn_norm.weight",
        "blk.2.hc_ffn_down.weight",
        "blk.3.hc_ffn_up.weight",
        "blk.3.hc_ffn_inject.weight",
        "blk.1.indexer.q_proj.weight",
        "blk.1.indexer.k_proj.weight",
        "blk.3.indexer.q_norm.weight",
        "blk.3.indexer.k_norm.weight",
        "blk.0.ple_key.weight",
        "blk.0.ple_value.weight",
        "blk.0.ple_norm_key.weight",
        "blk.0.ple_norm_query.weight",
        "blk.0.ple_norm_conv.weight",
        "blk.0.ple_conv1d.weight",
        "blk.2.ffn_gate_inp_shexp.weight",
    ],
)
def test_missing_and_cut_tensors_are_named(path: Path, tmp_path: Path, name: str) -> None:
    refuse(path, tmp_path / "bad.gguf", without(name), f"tensor {name} is missing")
    refuse(path, tmp_path / "bad.gguf", cut(name), f"{name} has shape")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (key("hyper_connection.count", U32, 1), r"hyper_connection\.count is 1, expected 2 to 64"),
        (key("hyper_connection.count", U32, 3), r"output_hc_norm\.weight has shape \[256,.*\[192,"),
        (key("hyper_connection.low_rank", U32, 0), r"low_rank is 0"),
        (key("attention.indexer.top_k", U32, 30), r"top_k is 30, expected a multiple of the 4 tokens"),
        (key("attention.indexer.top_k", U32, 0), r"top_k is 0"),
        (key("attention.indexer.head_count", U32, 0), r"indexer\.head_count is 0"),
        (key("attention.indexer.key_length", U32, 8), r"key_length is 8, less than the 16 rotated features"),
        (key("attention.compress_ratios", ARRAY, [0, 4, 0, 8], U32), r"compress_ratios has 4 and 8, expected one size"),
        (key("attention.compress_ratios", ARRAY, [0, 1, 0, 1], U32), r"compress_ratios has 1, expected a power of two"),
        (key("attention.compress_ratios", ARRAY, [0, 3, 0, 3], U32), r"compress_ratios has 3, expected a power of two"),
        (key("attention.compress_ratios", ARRAY, [0, 4, 0], U32), r"compress_ratios.* has 3 elements, expected 4"),
        (key("full_attention_interval", U32, 9), r"no layer of the qwen4exp model attends"),
        (key("ple.layers", ARRAY, [0, 2], U32), r"ple\.layers has 2 layers, at most 1"),
        (key("ple.layers", ARRAY, [1], U32), r"ple\.layers has 1, which attends; expected a recurrent layer"),
        (key("ple.layers", ARRAY, [4], U32), r"ple\.layers is 4, expected 0 to 3"),
        (key("ple.layers", ARRAY, [2], U32), r"blk\.2\.ple_key\.weight is missing"),
        (key("ple.ngram_size", U32, 1), r"ngram_size is 1, expected 2 to 8"),
        (key("ple.ngram_size", U32, 9), r"ngram_size is 9, expected 2 to 8"),
        (key("ple.ngram_size", U32, 4), r"layer_multipliers.* has 3 elements, expected 4"),
        (key("ple.heads_per_ngram", U32, 33), r"makes 66 hashes of a token; at most 64"),
        (key("ple.heads_per_ngram", U32, 1), r"ple_key\.weight has shape \[64, 256, 1, 1\].*\[32, 256"),
        (key("ple.eos_token_id", U32, 5000), r"eos_token_id is 5000"),
        (key("ple.conv_kernel", U32, 3), r"ple_conv1d\.weight has shape"),
        (key("ple.head_vocab_sizes", ARRAY, [101, 0, 107, 109], U64), r"head_vocab_sizes has 0, expected at least 1"),
        (key("ple.head_vocab_sizes", U32, 101), r"head_vocab_sizes is not an array"),
        (key("ple.head_offsets", ARRAY, [0, 101, 204, 2**31], U64), r"reach row 2147483648 \+ 109, beyond the limit"),
        (key("ple.head_offsets", ARRAY, [0, 101, 204, 500], U64), r"has shape \[16, 512, 1, 1\].* at least 609"),
        (key("embedding_length_per_layer_input", U32, 32), r"per_layer_token_embd\.weight has shape .* rows of 32"),
        (without("per_layer_token_embd.weight"), r"per_layer_token_embd\.weight is missing"),
    ],
)
def test_unusable_models_are_refused_with_their_reason(
    path: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refuse(path, tmp_path / "bad.gguf", changes, message)


def logits_of(path: Path, **arguments: Any) -> np.ndarray:
    engine = Engine(Model(path, **arguments), n_ctx=256)
    return position_logits(engine, list(range(3, 63)))


def test_prediction_blocks_are_left_alone_unless_asked_for(with_mtp: Path, tmp_path: Path) -> None:
    plain, full = Model(with_mtp), Model(with_mtp, load_mtp=True)
    assert (plain.n_layer, plain.n_mtp, full.n_layer, full.n_mtp) == (2, 0, 2, 1)
    assert_same_bits(logits_of(with_mtp, load_mtp=True), logits_of(with_mtp), "with multi-token prediction")
    for name in ("nextn.eh_proj.weight", "nextn.hc_head_up.weight", "indexer.k_proj.weight", "hc_attn_norm.weight"):
        changes = without(f"blk.2.{name}")
        path = rewrite(with_mtp, tmp_path / "part.gguf", architecture="qwen4exp", **changes)
        assert_same_bits(logits_of(path), logits_of(with_mtp), f"without {name}")
        refuse(with_mtp, tmp_path / "bad.gguf", changes, rf"blk\.2\.{name} is missing", load_mtp=True)


def test_a_file_of_prediction_blocks_alone_is_refused(with_mtp: Path, tmp_path: Path) -> None:
    def prediction_only(name: str, data: np.ndarray) -> np.ndarray | None:
        return None if name.startswith(("blk.0.", "blk.1.", "per_layer")) else data

    message = r"only the multi-token prediction .*no blk\.0\.hc_attn_norm\.weight"
    refuse(with_mtp, tmp_path / "only.gguf", {"tensors": prediction_only}, message)
