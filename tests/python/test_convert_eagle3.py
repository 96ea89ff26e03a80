"""`convert-hf-to-gguf` for EAGLE-3 drafters: a tiny drafter's file is taken apart into a checkpoint, comes back from it
tensor by tensor and key by key, and drafts the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama._engine import DraftOrder, Engine, GgufFile, Model, Speculator, Work
from support.checkpoints import CONFIGS, write_json, write_tokenizer
from support.convert_program import failure, run
from support.eagle3_checkpoints import checkpoint_tensors, write_eagle3_checkpoint
from support.tiny_eagle3 import write_tiny_eagle3
from support.tiny_llama import write_tiny_llama

FEWER = sorted(np.random.default_rng(3).choice(300, 120, replace=False).tolist())
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True},
    "own tables, wider": {"own_embeddings": True, "own_head": True, "n_embd": 96},
    "smaller head": {"draft_to_target": FEWER},
}


def write_drafter(path: Path, **shape: Any) -> Path:
    return write_tiny_eagle3(path, **({"norm_before_residual": False, "norm_before_fc": False} | shape))


def target_folder(folder: Path, **changes: Any) -> Path:
    """A target of the tiny models' shape; only its configuration and its tokenizer are read."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIGS["llama"] | {"num_hidden_layers": 4, "vocab_size": 300} | changes)
    write_tokenizer(folder)
    return folder


def convert(tmp_path: Path, checkpoint: Path, outtype: str = "f32", **target: Any) -> Path:
    path = tmp_path / "converted.gguf"
    folder = target_folder(tmp_path / "target", **target)
    assert run(checkpoint, "--target-model-dir", folder, "--outtype", outtype, "--outfile", path) == 0
    return path


def own_keys(path: Path) -> dict[str, Any]:
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in GgufFile(path).metadata.items()
        if key.startswith("eagle3.") or key.endswith(("ggml.tokens", "ggml.merges"))
    }


def draft(target: Path, drafter: Path) -> Any:
    engine = Engine(Model(target, drafter=drafter), n_ctx=512, n_threads=1)
    engine.step([Work(0, np.random.default_rng(5).integers(3, 290, 40).tolist())])
    speculator = Speculator(engine, ("draft-eagle3",), draft_n_max=5, draft_samples=True)
    return speculator.draft([DraftOrder(0, 9, 5, 1.0, 3)])[0]


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_converted_drafter_is_the_one_that_was_taken_apart(tmp_path: Path, kind: str, is_nested: bool) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", **KINDS[kind])
    converted = convert(tmp_path, write_eagle3_checkpoint(tmp_path / "checkpoint", drafter, is_nested=is_nested))
    found, expected = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors} for path in (converted, drafter)
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tensor_type == tensor.tensor_type
        np.testing.assert_array_equal(found[name].data, tensor.data, err_msg=name)
    keys = own_keys(converted)
    assert keys.pop("eagle3.vocab_size") == 300
    assert keys == own_keys(drafter)


@pytest.mark.parametrize("kind", ["plain", "smaller head"])
def test_converted_drafter_drafts_the_same(tmp_path: Path, kind: str) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_drafter(tmp_path / "drafter.gguf", **KINDS[kind])
    converted = convert(tmp_path, write_eagle3_checkpoint(tmp_path / "checkpoint", drafter))
    assert draft(target, converted) == draft(target, drafter)
    assert draft(target, converted).tokens


def test_layers_that_are_not_named_are_the_usual_ones(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    unnamed: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": None, "target_hidden_size": None}
    checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", drafter, config=unnamed)
    keys = own_keys(convert(tmp_path, checkpoint, num_hidden_layers=32))
    assert keys["eagle3.target_layers"] == [2, 16, 29]
    assert keys["eagle3.target_hidden_size"] == 64
    section = unnamed | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 31], "use_aux_hidden_state": True}}
    checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", drafter, config=section)
    assert own_keys(convert(tmp_path, checkpoint, num_hidden_layers=32))["eagle3.target_layers"] == [1, 2, 32]


def test_copies_of_the_targets_and_backward_maps_are_left_out(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", draft_to_target=FEWER)
    tensors = checkpoint_tensors(drafter, "midlayer.") | {
        "t2d": np.zeros(300, bool),
        "verifier_norm.weight": np.ones(64, np.float32),
    }
    checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", drafter, tensors=tensors)
    names = {tensor.name for tensor in gguf.GGUFReader(convert(tmp_path, checkpoint)).tensors}
    assert names == {tensor.name for tensor in gguf.GGUFReader(drafter).tensors}


def test_llama3_scaling_becomes_divisors(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", drafter, config={"rope_scaling": scaling})
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(convert(tmp_path, checkpoint)).tensors}
    assert tensors["rope_freqs.weight"].shape == (16,)
    assert tensors["rope_freqs.weight"][-1] == 8.0


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf")
    target = target_folder(tmp_path / "target")

    def refused(config: dict[str, Any], **changes: Any) -> str:
        checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", drafter, config=config)
        return failure(capsys, checkpoint, "--target-model-dir", target_folder(tmp_path / "other", **changes))

    checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", drafter)
    assert "--target-model-dir" in failure(capsys, checkpoint)
    assert "target_hidden_size is 64, expected 128" in refused({}, hidden_size=128)
    assert "vocab_size is 300, expected 304" in refused({}, vocab_size=304)
    assert "eagle_aux_hidden_state_layer_ids is [1, 3, 2], expected" in refused({}, num_hidden_layers=2)
    assert "three layers" in refused({"eagle_aux_hidden_state_layer_ids": [1, 2]})
    assert "num_hidden_layers is 2" in refused({"num_hidden_layers": 2})
    assert "norm_output is True" in refused({"norm_output": True})
    wide = write_drafter(tmp_path / "wide.gguf", n_embd=96)
    checkpoint = write_eagle3_checkpoint(tmp_path / "checkpoint", wide)
    assert "embeddings and head are missing" in failure(capsys, checkpoint, "--target-model-dir", target)
