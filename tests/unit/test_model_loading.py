"""Files that are valid GGUF but not usable models: each is a ModelError naming the tensor or key and both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama._engine import Engine, Model, backend_info
from pyllama.errors import GgufError, InvalidArgument, ModelError
from support.logits import assert_same_bits, position_logits
from support.rewritten_gguf import ARRAY, F32, STRING, U32, edit_one, rewrite
from support.tiny_llama import write_tiny_llama


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": edit_one("blk.1.attn_k.weight", lambda data: None)}, r"blk\.1\.attn_k\.weight is missing"),
        ({"tensors": edit_one("output_norm.weight", lambda data: None)}, r"output_norm\.weight is missing"),
        (
            {"tensors": edit_one("blk.0.ffn_up.weight", lambda data: data[:, :-32])},
            r"blk\.0\.ffn_up\.weight has shape \[32, 128, 1, 1\].*\[64, 128, 1, 1\]",
        ),
        ({"tensors": edit_one("blk.0.attn_norm.weight", lambda data: data[:3])}, r"attn_norm\.weight has shape \[3,"),
        ({"extra": {"blk.0.ffn_up.scale": np.ones(2, np.float32)}}, r"ffn_up\.scale has shape \[2, .*\[1, 1, 1, 1\]"),
        ({"extra": {"blk.0.ffn_up.scale": np.full(1, np.nan, np.float32)}}, r"ffn_up\.scale has a value that is not"),
        ({"extra": {"blk.0.attn_norm.scale": np.ones(1, np.float32)}}, r"attn_norm\.scale: only matrices"),
        ({"extra": {"token_embd.scale": np.ones(1, np.float32)}}, r"token_embd\.scale: only matrices"),
        ({"tensors": edit_one("blk.0.ffn_up.weight", lambda data: data.astype(np.int8))}, "type i8"),
        ({"keys": {"llama.block_count": None}}, "llama.block_count"),
        ({"keys": {"llama.block_count": (U32, 0)}}, "llama.block_count is 0"),
        ({"keys": {"llama.block_count": (U32, 513)}}, "llama.block_count is 513"),
        ({"keys": {"llama.block_count": (STRING, "two")}}, "llama.block_count"),
        ({"keys": {"llama.block_count": (ARRAY, [2, 2], U32)}}, "llama.block_count"),
        ({"keys": {"llama.context_length": None}}, "llama.context_length"),
        ({"keys": {"llama.attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon"),
        ({"keys": {"llama.attention.layer_norm_rms_epsilon": (F32, float("nan"))}}, "layer_norm_rms_epsilon"),
        ({"keys": {"llama.attention.head_count": (U32, 3)}}, "heads have 21 features"),
        ({"keys": {"llama.attention.head_count_kv": (U32, 3)}}, "4 heads over 3 kv heads"),
        ({"keys": {"llama.attention.head_count": (U32, 0)}}, "llama.attention.head_count is 0"),
        ({"keys": {"llama.attention.head_count": (ARRAY, [4], U32)}}, "llama.attention.head_count"),
        ({"keys": {"llama.rope.dimension_count": (U32, 8)}}, "llama.rope.dimension_count is 8"),
        ({"keys": {"llama.rope.freq_base": (F32, 0.0)}}, "llama.rope.freq_base"),
        ({"keys": {"llama.expert_count": (U32, 8)}}, "llama.expert_used_count"),
        ({"architecture": "frobnicator"}, "architecture 'frobnicator' is not supported yet; supported: .*llama"),
    ],
)
def test_unusable_models_are_refused_with_their_reason(
    tiny_llama_path: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        Model(rewrite(tiny_llama_path, tmp_path / "bad.gguf", **changes))


def test_the_unchanged_copy_loads(tiny_llama_path: Path, tmp_path: Path) -> None:
    assert Model(rewrite(tiny_llama_path, tmp_path / "same.gguf")).n_vocab == Model(tiny_llama_path).n_vocab


def test_per_layer_arrays_are_read_like_the_scalar(tiny_llama_path: Path, tmp_path: Path) -> None:
    arrays = {"llama.attention.head_count": (ARRAY, [4, 4], U32), "llama.feed_forward_length": (ARRAY, [128, 128], U32)}
    model = Model(rewrite(tiny_llama_path, tmp_path / "arrays.gguf", keys=arrays))
    logits = []
    for each in (model, Model(tiny_llama_path)):
        engine = Engine(each, n_ctx=256)
        engine.decode([3, 4, 5])
        logits.append(engine.logits())
    np.testing.assert_array_equal(*logits)


def test_check_tensors_names_the_tensor_with_a_non_finite_value(tiny_llama_path: Path, tmp_path: Path) -> None:
    def poison(data: np.ndarray) -> np.ndarray:
        data[5, 7] = np.inf
        return data

    path = rewrite(tiny_llama_path, tmp_path / "inf.gguf", tensors=edit_one("blk.1.ffn_down.weight", poison))
    Model(path)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight has non-finite values"):
        Model(path, check_tensors=True)


def test_overrides_replace_metadata_on_lookup(tiny_llama_path: Path) -> None:
    model = Model(tiny_llama_path, kv_overrides={"llama.context_length": 4096, "general.name": "other"})
    assert model.n_ctx_train == 4096
    assert (model.metadata["llama.context_length"], model.metadata["general.name"]) == (4096, "other")
    with pytest.raises(ModelError, match=r"llama\.block_count is 600"):
        Model(tiny_llama_path, kv_overrides={"llama.block_count": 600})
    with pytest.raises(InvalidArgument, match="list"):
        Model(tiny_llama_path, kv_overrides={"llama.block_count": [1]})  # type: ignore[dict-item]


def test_missing_files_and_other_formats_are_gguf_errors(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"nothing\.gguf"):
        Model(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_text("just some text, long enough for a header")
    with pytest.raises(GgufError, match="just"):
        Model(tmp_path / "text.gguf")
    with pytest.raises(GgufError):
        Model(tmp_path)


def test_an_unknown_instruction_set_is_refused(tiny_llama_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="abacus"):
        Model(tiny_llama_path, isa="abacus")


def test_every_available_instruction_set_loads(tiny_llama_path: Path) -> None:
    for isa in backend_info()["available"]:
        assert Model(tiny_llama_path, isa=isa).isa == isa


def test_model_facts_come_from_the_file(tmp_path: Path) -> None:
    model = Model(write_tiny_llama(tmp_path / "m.gguf", weight_type="q8_0", n_layer=3))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert model.architecture == "llama"
    assert model.n_layer == 3
    assert model.n_embd == 64
    assert model.n_params == sum(int(np.prod(tensor.shape)) for tensor in reader.tensors)
    assert model.size_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert model.ftype_label == "Q8_0"
    assert model.metadata["general.name"] == "tiny random llama"


def test_a_bias_of_the_fused_projection_is_the_biases_of_its_parts(tmp_path: Path) -> None:
    parts = write_tiny_llama(tmp_path / "parts.gguf", fused_qkv=True, qkv_bias=True)
    biases = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(parts).tensors if ".bias" in tensor.name}
    fused = {
        f"blk.{layer}.attn_qkv.bias": np.concatenate([biases[f"blk.{layer}.attn_{part}.bias"] for part in "qkv"])
        for layer in range(2)
    }

    def without_parts(name: str, data: np.ndarray) -> np.ndarray | None:
        return None if name in biases else data

    whole = rewrite(parts, tmp_path / "whole.gguf", tensors=without_parts, extra=fused)
    logits = [position_logits(Engine(Model(path), n_ctx=256), list(range(3, 33))) for path in (parts, whole)]
    assert_same_bits(logits[1], logits[0], "attn_qkv.bias")
