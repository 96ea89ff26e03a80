"""Hybrid files that do not fit together: a ModelError naming the tensor or key. Forms of files that say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama._engine import Engine, Model
from pyllama.errors import ModelError
from support.logits import assert_same_bits, position_logits
from support.rewritten_gguf import ARRAY, STRING, U32, cut, edit_one, rewrite, without
from support.tiny_hybrid import write_tiny_hybrid

I32 = gguf.GGUFValueType.INT32
BOOL = gguf.GGUFValueType.BOOL
SECTIONS, RECURRENT = "qwen35.rope.dimension_sections", "qwen35.attention.recurrent_layers"
N_HEAD, HEAD_DIM = 4, 32  # of write_tiny_hybrid


def key(name: str, *value: Any) -> dict[str, Any]:
    """Changes for `rewrite`: another value of a key; None: without it."""
    return {"keys": {name: None if value == (None,) else value}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three delta nets and one attention; two blocks and a third of multi-token prediction."""
    folder = tmp_path_factory.mktemp("hybrids")
    return {
        "qwen35": write_tiny_hybrid(folder / "dense.gguf", n_layer=4),
        "qwen35moe": write_tiny_hybrid(folder / "experts.gguf", "qwen35moe", n_layer=4),
        "mtp": write_tiny_hybrid(folder / "mtp.gguf", n_layer=2, attention_interval=2, n_mtp=1),
    }


def logits_of(path: Path, **arguments: Any) -> np.ndarray:
    engine = Engine(Model(path, **arguments), n_ctx=256)
    return position_logits(engine, list(range(3, 43)))


MISSING_KEYS = ["ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"]
DELTA_TENSORS = ["attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_beta.weight"]
DELTA_TENSORS += ["ssm_alpha.weight", "ssm_norm.weight", "ssm_out.weight", "post_attention_norm.weight"]
ATTENTION_TENSORS = ["attn_q.weight", "attn_k.weight", "attn_output.weight", "attn_q_norm.weight", "attn_k_norm.weight"]


@pytest.mark.parametrize("name", [*MISSING_KEYS, "rope.dimension_sections"])
def test_a_missing_key_is_named(files: dict[str, Path], tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"qwen35\.{name}.* is missing"):
        Model(rewrite(files["qwen35"], tmp_path / "bad.gguf", architecture="qwen35", **key(f"qwen35.{name}", None)))


@pytest.mark.parametrize(
    "name", [*(f"blk.1.{name}" for name in DELTA_TENSORS), *(f"blk.3.{name}" for name in ATTENTION_TENSORS)]
)
def test_missing_and_cut_tensors_are_named(files: dict[str, Path], tmp_path: Path, name: str) -> None:
    for changes, message in ((without(name), f"tensor {name} is missing"), (cut(name), f"{name} has shape")):
        with pytest.raises(ModelError, match=message):
            Model(rewrite(files["qwen35"], tmp_path / "bad.gguf", architecture="qwen35", **changes))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen35", key("qwen35.ssm.conv_kernel", U32, 1), r"ssm\.conv_kernel is 1, expected 2 to 64"),
        ("qwen35", key("qwen35.ssm.conv_kernel", U32, 3), r"ssm_conv1d\.weight has shape \[4, 256, 1, 1\].*\[3, 256"),
        ("qwen35", key("qwen35.ssm.conv_kernel", STRING, "4"), r"ssm\.conv_kernel"),
        ("qwen35", key("qwen35.ssm.state_size", U32, 8), r"ssm\.state_size is 8, expected 16 to"),
        ("qwen35", key("qwen35.ssm.state_size", U32, 40), r"ssm\.state_size is 40, expected a multiple of 16"),
        ("qwen35", key("qwen35.ssm.group_count", U32, 3), r"ssm\.time_step_rank is 4, expected a multiple of the 3"),
        ("qwen35", key("qwen35.ssm.group_count", U32, 0), r"ssm\.group_count is 0"),
        ("qwen35", key("qwen35.ssm.group_count", U32, 1), r"attn_qkv\.weight has shape \[64, 256,.*\[64, 192,"),
        ("qwen35", key("qwen35.ssm.inner_size", U32, 64), r"ssm\.inner_size is 64, expected 4 value heads of 32"),
        ("qwen35", key(SECTIONS, ARRAY, [0, 0, 0, 0], I32), r"dimension_sections has only zeros"),
        ("qwen35", key(SECTIONS, ARRAY, [3, -3, 2, 0], I32), r"dimension_sections is -3"),
        ("qwen35", key(SECTIONS, ARRAY, [3, 3, 2], I32), r"dimension_sections.* has 3 elements, expected 4"),
        ("qwen35", key(SECTIONS, STRING, "mrope"), r"dimension_sections"),
        ("qwen35", key(RECURRENT, ARRAY, [True, True, False], BOOL), r"recurrent_layers.* has 3 elements, expected 4"),
        ("qwen35", key(RECURRENT, ARRAY, [1, 1, 1, 2], U32), r"recurrent_layers is 2, expected 0 to 1"),
        ("qwen35", key(RECURRENT, ARRAY, [True] * 4, BOOL), r"no layer of the qwen35 model attends"),
        ("qwen35", key(RECURRENT, ARRAY, [True, True, False, True], BOOL), r"blk\.2\.attn_q\.weight is missing"),
        ("qwen35", key("qwen35.full_attention_interval", U32, 0), r"full_attention_interval is 0"),
        ("qwen35", key("qwen35.full_attention_interval", U32, 9), r"no layer of the qwen35 model attends"),
        ("qwen35", key("qwen35.nextn_predict_layers", U32, 4), r"nextn_predict_layers leaves no layer"),
        ("qwen35", key("qwen35.attention.head_count", ARRAY, [4, 4, 4, 0], U32), r"blk\.3.* 0 heads over"),
        ("qwen35", key("qwen35.attention.head_count_kv", U32, 3), r"4 heads over 3 kv heads"),
        (
            "qwen35",
            key("qwen35.attention.value_length", U32, 16),
            r"value_length is 16; gates of attention need the 32",
        ),
        ("qwen35", {"extra": {"blk.3.attn_q.bias": np.ones(128, np.float32)}}, r"attn_q\.bias has shape \[128,"),
        ("qwen35moe", key("qwen35moe.expert_count", None), r"qwen35moe\.expert_count is 0 or missing"),
        ("qwen35moe", key("qwen35moe.expert_shared_feed_forward_length", U32, 64), r"ffn_gate_shexp\.weight has shape"),
        ("qwen35moe", without("blk.1.ffn_gate_inp_shexp.weight"), r"blk\.1\.ffn_gate_inp_shexp\.weight is missing"),
        ("qwen35moe", without("blk.1.ffn_down_shexp.weight"), r"blk\.1\.ffn_down_shexp\.weight is missing"),
        ("qwen35moe", cut("blk.2.ffn_gate_inp_shexp.weight"), r"ffn_gate_inp_shexp\.weight has shape \[63,"),
    ],
)
def test_unusable_models_are_refused_with_their_reason(
    files: dict[str, Path], tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Model(rewrite(files[architecture], tmp_path / "bad.gguf", architecture=architecture, **changes))


def test_layers_that_do_not_attend_may_have_no_heads(files: dict[str, Path], tmp_path: Path) -> None:
    keys = {
        f"qwen35.attention.{name}": (ARRAY, [0, 0, 0, n], U32) for name, n in (("head_count", 4), ("head_count_kv", 2))
    }
    path = rewrite(files["qwen35"], tmp_path / "heads.gguf", architecture="qwen35", keys=keys)
    assert_same_bits(logits_of(path), logits_of(files["qwen35"]), "heads per layer")


def test_which_layers_attend_may_be_an_array_or_an_interval(files: dict[str, Path], tmp_path: Path) -> None:
    changes = key(RECURRENT, ARRAY, [True, True, True, False], BOOL)
    changes["keys"]["qwen35.full_attention_interval"] = (U32, 2)  # the array counts
    path = rewrite(files["qwen35"], tmp_path / "array.gguf", architecture="qwen35", **changes)
    assert_same_bits(logits_of(path), logits_of(files["qwen35"]), "recurrent_layers")


def test_gates_and_ups_of_experts_may_be_one_tensor(files: dict[str, Path], tmp_path: Path) -> None:
    pieces: dict[str, np.ndarray] = {}

    def take(name: str, data: np.ndarray) -> np.ndarray | None:
        if "ffn_gate_exps" in name or "ffn_up_exps" in name:
            pieces[name] = data
            return None
        return data

    source = files["qwen35moe"]
    rewrite(source, tmp_path / "dropped.gguf", architecture="qwen35moe", tensors=take)
    fused = {
        f"blk.{layer}.ffn_gate_up_exps.weight": np.concatenate(
            [pieces[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")], axis=1
        )
        for layer in range(4)
    }
    path = rewrite(source, tmp_path / "fused.gguf", architecture="qwen35moe", tensors=take, extra=fused)
    assert_same_bits(logits_of(path), logits_of(source), "ffn_gate_up_exps")
    fused["blk.2.ffn_gate_up_exps.weight"] = fused["blk.2.ffn_gate_up_exps.weight"][:, :-1].copy()
    with pytest.raises(ModelError, match=r"blk\.2\.ffn_gate_up_exps\.weight has shape \[64, 255, 8, 1\]"):
        Model(rewrite(source, tmp_path / "bad.gguf", architecture="qwen35moe", tensors=take, extra=fused))


def test_a_bias_of_queries_and_gates_is_split_as_their_matrix_is(files: dict[str, Path], tmp_path: Path) -> None:
    """Gates far beyond saturation are 1 whatever their matrix says; queries with such a bias would be another model."""
    bias = np.zeros((N_HEAD, 2, HEAD_DIM), np.float32)
    bias[:, 1] = 1e6

    def without_gates(data: np.ndarray) -> np.ndarray:
        data = data.reshape(N_HEAD, 2, HEAD_DIM, -1).copy()
        data[:, 1] = 0
        return data.reshape(2 * N_HEAD * HEAD_DIM, -1)

    extra = {"blk.3.attn_q.bias": bias.reshape(-1)}
    source = files["qwen35"]
    biased = rewrite(source, tmp_path / "biased.gguf", architecture="qwen35", extra=extra)
    edit = edit_one("blk.3.attn_q.weight", without_gates)
    open_gates = rewrite(source, tmp_path / "open.gguf", architecture="qwen35", extra=extra, tensors=edit)
    assert_same_bits(logits_of(open_gates), logits_of(biased), "saturated gates")
    assert (logits_of(biased) != logits_of(source)).any()


def halved_with_a_scale_of_two(source: Path, target: Path, architecture: str) -> Path:
    """Matrices with a scale beside them that says the same: powers of two, another for each expert."""
    scales: dict[str, np.ndarray] = {}

    def divide(name: str, data: np.ndarray) -> np.ndarray:
        is_scaled = name.endswith(".weight") and data.ndim > 1 and "token_embd" not in name and "conv1d" not in name
        if not is_scaled:
            return data
        scale = np.float32(2) ** np.arange(1, 1 + (len(data) if data.ndim == 3 else 1), dtype=np.float32)
        scales[name.removesuffix("weight") + "scale"] = scale
        return data / (scale.reshape(-1, 1, 1) if data.ndim == 3 else scale)

    rewrite(source, target, architecture=architecture, tensors=divide)
    return rewrite(source, target, architecture=architecture, tensors=divide, extra=scales)


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_scales_beside_matrices_multiply_their_products(
    files: dict[str, Path], tmp_path: Path, architecture: str
) -> None:
    path = halved_with_a_scale_of_two(files[architecture], tmp_path / "scaled.gguf", architecture)
    assert_same_bits(logits_of(path), logits_of(files[architecture]), "weights over scales")


def test_prediction_blocks_are_left_alone_unless_asked_for(files: dict[str, Path], tmp_path: Path) -> None:
    source = files["mtp"]
    plain, full = Model(source), Model(source, load_mtp=True)
    assert (plain.n_layer, plain.n_mtp, full.n_layer, full.n_mtp) == (2, 0, 2, 1)
    assert_same_bits(logits_of(source, load_mtp=True), logits_of(source), "with multi-token prediction")
    for name in ("nextn.eh_proj.weight", "nextn.enorm.weight", "attn_q.weight", "ffn_up.weight"):
        path = rewrite(source, tmp_path / "part.gguf", architecture="qwen35", **without(f"blk.2.{name}"))
        assert_same_bits(logits_of(path), logits_of(source), f"without {name}")
        with pytest.raises(ModelError, match=rf"blk\.2\.{name} is missing"):
            Model(path, load_mtp=True)


def test_a_file_of_prediction_blocks_alone_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    def prediction_only(name: str, data: np.ndarray) -> np.ndarray | None:
        return None if name.startswith(("blk.0.", "blk.1.")) else data

    path = rewrite(files["mtp"], tmp_path / "only.gguf", architecture="qwen35", tensors=prediction_only)
    with pytest.raises(ModelError, match=r"only the multi-token prediction .*no blk\.0\.attn_norm\.weight"):
        Model(path)


def test_only_models_with_a_state_are_recurrent(files: dict[str, Path], tmp_path: Path) -> None:
    attending = write_tiny_hybrid(tmp_path / "attending.gguf", n_layer=2, attention_interval=1)
    assert [Model(path).is_recurrent for path in (files["qwen35"], files["qwen35moe"], attending)] == [
        True,
        True,
        False,
    ]
