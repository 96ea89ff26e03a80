"""Files of the families beside dense `llama` that do not fit together: a ModelError naming the tensor or key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama._engine import Engine, Model
from pyllama.errors import ModelError
from support.logits import assert_same_bits, position_logits
from support.rewritten_gguf import ARRAY, F32, STRING, U32, cut, edit_one, rewrite, without
from support.tiny_models import write_tiny_model

I32 = gguf.GGUFValueType.INT32
BOOL = gguf.GGUFValueType.BOOL
WINDOW, PATTERN = "gemma3.attention.sliding_window", "gemma3.attention.sliding_window_pattern"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    paths = {name: folder / f"{name}.gguf" for name in ("qwen2", "qwen3", "qwen3moe", "gemma3", "llama")}
    for name, path in paths.items():
        metadata = {WINDOW: 8} if name == "gemma3" else None
        write_tiny_model(path, name, metadata=metadata)
    return paths


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen2", without("blk.1.attn_k.weight"), r"blk\.1\.attn_k\.weight is missing"),
        ("qwen2", cut("blk.1.attn_v.bias"), r"blk\.1\.attn_v\.bias has shape \[31,"),
        ("qwen2", {"keys": {"qwen2.attention.key_length": (U32, 32)}}, r"qwen2\.attention\.head_count is 4 with heads"),
        ("qwen2", {"keys": {"qwen2.attention.head_count_kv": (U32, 3)}}, "4 heads over 3 kv heads"),
        ("qwen2", {"keys": {"qwen2.attention.head_count_kv": (U32, 0)}}, "4 heads over 0 kv heads"),
        ("qwen3", without("blk.0.attn_q_norm.weight"), r"blk\.0\.attn_q_norm\.weight is missing"),
        ("qwen3", without("blk.1.attn_k_norm.weight"), r"blk\.1\.attn_k_norm\.weight is missing"),
        ("qwen3", cut("blk.0.attn_q_norm.weight"), r"attn_q_norm\.weight has shape \[15,"),
        ("qwen3", {"keys": {"qwen3.feed_forward_length": None}}, "feed-forward of 0"),
        ("qwen3", {"keys": {"qwen3.rope.dimension_count": (U32, 15)}}, r"qwen3\.rope\.dimension_count is odd"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_count": None}}, r"qwen3moe\.expert_count is 0 or missing"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_count": (U32, 0)}}, r"qwen3moe\.expert_count is 0 or missing"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_count": (U32, 1025)}}, r"qwen3moe\.expert_count is 1025"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_count": (U32, 7)}}, r"ffn_gate_inp\.weight has shape \[64, 8,"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_used_count": None}}, r"qwen3moe\.expert_used_count"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_used_count": (U32, 0)}}, r"expert_used_count is 0, expected 1 to 8"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_used_count": (U32, 9)}}, r"expert_used_count is 9, expected 1 to 8"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_feed_forward_length": (U32, 64)}}, r"ffn_gate_exps\.weight has shape"),
        ("qwen3moe", {"keys": {"qwen3moe.expert_feed_forward_length": (STRING, "1")}}, "expert_feed_forward_length"),
        ("qwen3moe", without("blk.1.ffn_gate_inp.weight"), r"blk\.1\.ffn_gate_inp\.weight is missing"),
        ("qwen3moe", without("blk.1.ffn_down_exps.weight"), r"blk\.1\.ffn_down_exps\.weight is missing"),
        ("qwen3moe", cut("blk.0.ffn_up_exps.weight"), r"ffn_up_exps\.weight has shape \[64, 128, 7, 1\].*128, 8, 1\]"),
        (
            "qwen3moe",
            {"tensors": edit_one("blk.0.ffn_up_exps.weight", lambda data: data.reshape(-1, 64))},
            r"ffn_up_exps\.weight has shape \[64, 1024, 1, 1\]",
        ),
        (
            "qwen3moe",
            {"extra": {"blk.0.ffn_down_exps.scale": np.ones(7, np.float32)}},
            r"ffn_down_exps\.scale has shape \[7, 1, 1, 1\].*\[8, 1, 1, 1\]",
        ),
        ("llama", {"keys": {"llama.expert_used_count": None}}, r"llama\.expert_used_count"),
        ("llama", {"keys": {"llama.expert_count": None}}, r"blk\.0\.ffn_gate\.weight is missing"),
        ("gemma3", without("blk.0.post_attention_norm.weight"), r"post_attention_norm\.weight is missing"),
        ("gemma3", without("blk.1.post_ffw_norm.weight"), r"blk\.1\.post_ffw_norm\.weight is missing"),
        ("gemma3", {"keys": {WINDOW: (I32, -1)}}, r"gemma3\.attention\.sliding_window is -1"),
        ("gemma3", {"keys": {PATTERN: (U32, 0)}}, r"sliding_window_pattern is 0"),
        ("gemma3", {"keys": {PATTERN: (ARRAY, [True], BOOL)}}, r"sliding_window_pattern.* has 1 elements, expected 2"),
        ("gemma3", {"keys": {PATTERN: (ARRAY, [1, 2], U32)}}, r"sliding_window_pattern is 2, expected 0 to 1"),
        ("gemma3", {"keys": {PATTERN: (STRING, "all")}}, "sliding_window_pattern"),
        ("gemma3", {"keys": {"gemma3.rope.freq_base_swa": (F32, 0.0)}}, r"gemma3\.rope\.freq_base_swa is not positive"),
        ("gemma3", {"keys": {"gemma3.rope.freq_base_swa": (F32, float("nan"))}}, r"freq_base_swa is not a finite"),
        ("gemma3", {"keys": {"gemma3.final_logit_softcapping": (F32, -1.0)}}, r"final_logit_softcapping is negative"),
        ("gemma3", {"keys": {"gemma3.attention.key_length_swa": (U32, 8)}}, r"gemma3\.attention\.key_length_swa"),
    ],
)
def test_unusable_models_are_refused_with_their_reason(
    files: dict[str, Path], tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Model(rewrite(files[architecture], tmp_path / "bad.gguf", architecture=architecture, **changes))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe", "gemma3", "llama"])
def test_the_unchanged_copy_loads(files: dict[str, Path], tmp_path: Path, architecture: str) -> None:
    model = Model(rewrite(files[architecture], tmp_path / "same.gguf", architecture=architecture))
    assert (model.architecture, model.n_layer) == (architecture, 2)


def logits_of(path: Path, **overrides: int) -> np.ndarray:
    engine = Engine(Model(path, kv_overrides=overrides), n_ctx=256)
    return position_logits(engine, list(range(3, 43)))


def test_old_qwen3moe_files_give_the_width_of_all_experts_of_a_token(files: dict[str, Path], tmp_path: Path) -> None:
    keys = {"qwen3moe.expert_feed_forward_length": None, "qwen3moe.feed_forward_length": (U32, 2 * 128)}
    old = rewrite(files["qwen3moe"], tmp_path / "old.gguf", keys=keys, architecture="qwen3moe")
    assert_same_bits(logits_of(old), logits_of(files["qwen3moe"]), "expert width from feed_forward_length")


def test_a_window_of_the_whole_sequence_is_no_window(files: dict[str, Path]) -> None:
    expected = logits_of(files["gemma3"], **{WINDOW: 40})
    assert_same_bits(logits_of(files["gemma3"], **{WINDOW: 2**31 - 1}), expected, "the longest window")
    narrow = logits_of(files["gemma3"], **{WINDOW: 39})
    assert_same_bits(narrow[:39], expected[:39], "positions before the window moves")
    assert (narrow[39] != expected[39]).any()


def test_equal_router_logits_choose_the_first_experts(files: dict[str, Path], tmp_path: Path) -> None:
    """All-zero routers: only the first two experts count, whatever the others hold."""

    def flat(name: str, data: np.ndarray) -> np.ndarray:
        return np.zeros_like(data) if "ffn_gate_inp" in name else data

    def wild(name: str, data: np.ndarray) -> np.ndarray:
        data = flat(name, data)
        if "_exps" in name:
            data[2:] = 1e3
        return data

    paths = [
        rewrite(files["qwen3moe"], tmp_path / f"{edit.__name__}.gguf", architecture="qwen3moe", tensors=edit)
        for edit in (flat, wild)
    ]
    assert_same_bits(logits_of(paths[1]), logits_of(paths[0]), "experts that no row goes to")
