"""`convert-hf-to-gguf` for DFlash, DFlash2 and DSpark drafters: a tiny drafter's file is taken apart into a
checkpoint, comes back from it tensor by tensor and key by key, and drafts the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama._engine import Engine, GgufFile, Model, Work
from support.checkpoints import CONFIGS, write_json, write_tokenizer
from support.convert_program import failure, run
from support.dflash_checkpoints import checkpoint_config, checkpoint_tensors, write_dflash_checkpoint
from support.tiny_dflash import write_tiny_dflash
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

SPARK: dict[str, Any] = {"version": 1, "block_size": 7, "markov_rank": 24, "from_anchor": True}
FEWER = sorted(np.random.default_rng(3).choice(300, 120, replace=False).tolist())
KINDS: dict[str, dict[str, Any]] = {
    "first": {"version": 1, "block_size": 16, "target_layers": (3, 1)},
    "second": {"target_layers": (1, 2)},
    "windowed in part, causal": {"windowed": (True, False), "causal": True},
    "without windows, three taps, small groups": {"window": None, "conv_taps": 3, "conv_group": 4, "causal": False},
    "keys are values": {"version": 1, "shared_kv": True},
    "own tables": {"own_embeddings": True, "own_head": True},
    "smaller head": {"draft_to_target": FEWER},
    "spark": SPARK,
    "spark from the row after the anchor": SPARK | {"from_anchor": False},
    "unsure spark of fewer tokens": SPARK | {"confidence_head": False, "draft_to_target": FEWER},
}


def target_folder(folder: Path, variant: str = "llama", **changes: Any) -> Path:
    """A target of the tiny models' shape; only its configuration and its tokenizer are read."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {"num_hidden_layers": 4, "vocab_size": 300}
    write_json(folder / "config.json", CONFIGS[variant] | layers | changes)
    write_tokenizer(folder)
    return folder


def convert(tmp_path: Path, checkpoint: Path, *arguments: str | Path, outtype: str = "f32") -> Path:
    path = tmp_path / "converted.gguf"
    target = target_folder(tmp_path / "target")
    assert run(checkpoint, "--target-model-dir", target, "--outtype", outtype, "--outfile", path, *arguments) == 0
    return path


def own_keys(path: Path) -> dict[str, Any]:
    metadata = GgufFile(path).metadata
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in metadata.items()
        if key.startswith("dflash.") or key.endswith(("mask_token_id", "ggml.tokens", "ggml.merges"))
    }


def drafts(target: Path, drafter: Path) -> list[tuple[Any, Any]]:
    engine = Engine(Model(target, drafter=drafter), n_ctx=512, n_threads=1)
    engine.step([Work(0, np.random.default_rng(5).integers(3, 290, 40).tolist())])
    return [engine.draft_blocks([(0, token)], 7)[0] for token in (9, 77, 250)]


@pytest.mark.parametrize("kind", KINDS)
def test_converted_drafter_is_the_one_that_was_taken_apart(tmp_path: Path, kind: str) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", **KINDS[kind])
    converted = convert(tmp_path, write_dflash_checkpoint(tmp_path / "checkpoint", drafter))
    found, expected = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (converted, drafter)
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tensor_type == tensor.tensor_type
        np.testing.assert_array_equal(found[name].shape, tensor.shape, err_msg=name)
        np.testing.assert_array_equal(found[name].data, tensor.data, err_msg=name)
    keys = own_keys(converted)
    assert keys.pop("dflash.vocab_size") == 300
    assert keys == own_keys(drafter)


@pytest.mark.parametrize("kind", ["first", "second", "smaller head", "spark"])
def test_converted_drafter_drafts_the_same(tmp_path: Path, kind: str) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", **KINDS[kind])
    converted = convert(tmp_path, write_dflash_checkpoint(tmp_path / "checkpoint", drafter))
    for found, expected in zip(drafts(target, converted), drafts(target, drafter), strict=True):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(found[2], expected[2])


def test_heads_of_dspark_that_files_cannot_say_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", **SPARK)
    target = target_folder(tmp_path / "target")
    section = checkpoint_config(drafter)["dflash_config"]

    def refused(**changes: Any) -> str:
        config = {"dflash_config": section | changes}
        checkpoint = write_dflash_checkpoint(tmp_path / "checkpoint", drafter, config=config)
        return failure(capsys, checkpoint, "--target-model-dir", target)

    assert "markov_head_type is 'gated'" in refused(markov_head_type="gated")
    assert "confidence_head_with_markov is False" in refused(confidence_head_with_markov=False)
    assert "markov_rank is 0" in refused(markov_rank=0)


def test_dspark_without_a_markov_head_is_a_dflash_that_tells_from_its_anchor(tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", version=1, block_size=7, from_anchor=True)
    named = {"architectures": ["Qwen3DSparkModel"]}
    converted = convert(tmp_path, write_dflash_checkpoint(tmp_path / "checkpoint", drafter, config=named))
    assert own_keys(converted)["dflash.sample_from_anchor"] is True
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    np.testing.assert_array_equal(drafts(target, converted)[0][1], drafts(target, drafter)[0][1])


def test_target_with_three_axes_gives_all_pairs_to_time(tmp_path: Path) -> None:
    target = write_tiny_hybrid(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", rope_sections=(16, 0, 0, 0))
    checkpoint = write_dflash_checkpoint(tmp_path / "checkpoint", drafter)
    path, hybrid = tmp_path / "out.gguf", target_folder(tmp_path / "hybrid", "qwen35")
    assert run(checkpoint, "--target-model-dir", hybrid, "--outtype", "f32", "--outfile", path) == 0
    assert own_keys(path)["dflash.rope.dimension_sections"] == [16, 0, 0, 0]
    np.testing.assert_array_equal(drafts(target, path)[0][1], drafts(target, drafter)[0][1])


def test_interleaved_pairs_are_put_in_halves(tmp_path: Path) -> None:
    """Such a checkpoint rotates dimensions 2p and 2p + 1 together, files p and p + 16."""
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", n_head=4, n_head_kv=2, head_dim=32)
    tensors = checkpoint_tensors(drafter)
    for name, values in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
            heads = values.reshape(-1, 2, 16, *values.shape[1:])
            tensors[name] = heads.swapaxes(1, 2).reshape(values.shape)
    checkpoint = write_dflash_checkpoint(
        tmp_path / "checkpoint", drafter, config={"rope_is_neox_style": False}, tensors=tensors
    )
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(convert(tmp_path, checkpoint)).tensors}
    for tensor in gguf.GGUFReader(drafter).tensors:
        np.testing.assert_array_equal(found[tensor.name], tensor.data, err_msg=tensor.name)


def test_matrices_are_rounded_and_kernels_and_norms_are_not(tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", selector_rank=32)
    converted = convert(tmp_path, write_dflash_checkpoint(tmp_path / "checkpoint", drafter), outtype="q8_0")
    types = {tensor.name: tensor.type_name for tensor in GgufFile(converted).tensors}
    assert types.pop("blk.0.attn_conv_base") == types.pop("blk.1.ffn_conv_base") == "f32"
    assert {types[name] for name in types if "norm" in name} == {"f32"}
    assert {types[f"selector_{name}.weight"] for name in ("predecessor", "successor", "hidden")} == {"q8_0"}
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    rounded, exact = drafts(target, converted), drafts(target, drafter)
    same = [np.intersect1d(a[0], b[0]).size for a, b in zip(rounded, exact, strict=True)]
    assert min(same) > 5  # of 35 candidates, of which some tokens repeat


def test_keys_of_older_checkpoints_stand_beside_the_others(tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", version=1, block_size=16)
    older = {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]}, "block_size": 16, "is_causal": None}
    checkpoint = write_dflash_checkpoint(tmp_path / "checkpoint", drafter, config=older)
    assert own_keys(convert(tmp_path, checkpoint))["dflash.block_size"] == 16


def test_scales_and_cap_are_kept(tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf")
    scales = {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}
    keys = own_keys(convert(tmp_path, write_dflash_checkpoint(tmp_path / "checkpoint", drafter, config=scales)))
    assert keys["dflash.embedding_scale"] == 8.0
    assert keys["dflash.logit_scale"] == 0.5
    assert keys["dflash.final_logit_softcapping"] == 30.0


def test_tokenizer_and_templates_are_the_targets(tmp_path: Path) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf")
    checkpoint = write_dflash_checkpoint(tmp_path / "Tiny-DFlash2", drafter)
    metadata = GgufFile(convert(tmp_path, checkpoint)).metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert "tokenizer.chat_template" in metadata
    assert metadata["general.name"] == "Tiny DFlash2"


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf")
    checkpoint = write_dflash_checkpoint(tmp_path / "checkpoint", drafter)
    target = target_folder(tmp_path / "target")
    assert "--target-model-dir" in failure(capsys, checkpoint)

    def refused(**changes: Any) -> str:
        other = target_folder(tmp_path / "other", **changes)
        return failure(capsys, checkpoint, "--target-model-dir", other)

    assert "hidden_size is 64, expected 128" in refused(hidden_size=128)
    assert "vocab_size is 300, expected 304" in refused(vocab_size=304)
    assert "target_layer_ids is [0, 1], expected" in refused(num_hidden_layers=2)
    assert "llama models are no drafters" in failure(capsys, target, "--target-model-dir", target)
    assert "is not a folder" in failure(capsys, checkpoint, "--target-model-dir", tmp_path / "none")
    (checkpoint / "mask_embedding.pt").write_bytes(b"PK")
    assert "mask_embedding.pt" in failure(capsys, checkpoint, "--target-model-dir", target)


def test_smaller_head_without_its_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = write_tiny_dflash(tmp_path / "drafter.gguf", draft_to_target=list(range(100, 200)))
    tensors = checkpoint_tensors(drafter)
    target = target_folder(tmp_path / "target")
    del tensors["d2t"]
    checkpoint = write_dflash_checkpoint(tmp_path / "checkpoint", drafter, tensors=tensors)
    assert "without the tokens" in failure(capsys, checkpoint, "--target-model-dir", target)
