"""Adapter files that are damaged, made for another model or made to harm: each is refused with its fault named."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, LoraAdapter, Model
from pyllama.errors import GgufError, InvalidArgument, ModelError, PyllamaError
from support.adapters import random_matrices, write_adapter
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_tiny_llama(tmp_path_factory.mktemp("model") / "model.gguf"))


@pytest.fixture(scope="module")
def matrices(model: Model) -> Any:
    return random_matrices(Path(model.path), lambda name: "attn" in name and "norm" not in name)


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen3"}, "for architecture 'qwen3', the model has 'llama'"),
        ({"keys": {"general.type": "model"}}, "general.type is 'model', expected 'adapter'"),
        ({"keys": {"general.type": None}}, "general.type"),
        ({"keys": {"adapter.type": "control_vector"}}, "adapter.type is 'control_vector', expected 'lora'"),
        ({"keys": {"adapter.alora.invocation_tokens": [1, 2]}}, "aLoRA"),
        ({"alpha": float("inf")}, "adapter.lora.alpha is not finite"),
        ({"alpha": float("nan")}, "adapter.lora.alpha is not finite"),
        ({"drop": [f"{Q}.lora_a"]}, f"{Q}.lora_a is missing"),
        ({"drop": [f"{Q}.lora_b"]}, f"{Q}.lora_b is missing"),
        ({"extra": {"blk.0.attn_norm.weight": ones(64)}}, "neither a .lora_a nor a .lora_b"),
        ({"extra": {".lora_a": ones(4, 64), ".lora_b": ones(64, 4)}}, "is not in the model"),
        ({"extra": {"blk.9.attn_q.weight.lora_a": ones(4, 64), "blk.9.attn_q.weight.lora_b": ones(64, 4)}},
         "blk.9.attn_q.weight of the adapter is not in the model"),
        ({"extra": {"blk.0.attn_norm.weight.lora_a": ones(1, 64), "blk.0.attn_norm.weight.lora_b": ones(1, 1)}},
         "blk.0.attn_norm.weight is not a matrix that can be adapted"),
        ({"extra": {f"{Q}.lora_a": ones(4, 32)}}, "do not adapt"),
        ({"extra": {f"{Q}.lora_b": ones(32, 4)}}, "do not adapt"),
        ({"extra": {f"{Q}.lora_a": ones(3, 64)}}, "do not adapt"),
        ({"extra": {f"{Q}.lora_a": ones(64, 4)}}, "do not adapt"),
        ({"extra": {f"{Q}.lora_a": ones(2, 4, 64), f"{Q}.lora_b": ones(2, 64, 4)}}, "do not adapt"),
        ({"extra": {"token_embd.weight.lora_a": ones(4, 64), "token_embd.weight.lora_b": ones(9, 4)}}, "do not adapt"),
        ({"extra": {f"{Q}.lora_a": np.ones((4, 64), np.int32)}}, "i32, which is not a weight type"),
    ],
)  # fmt: skip
def test_what_is_no_adapter_of_the_model_is_refused(model, matrices, tmp_path, changes, message):
    file = write_adapter(tmp_path / "a.gguf", matrices, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        LoraAdapter(model, file)
    assert str(file) in str(caught.value)


def test_an_adapter_without_tensors_and_a_model_as_adapter_are_refused(model, tmp_path):
    with pytest.raises(ModelError, match="no tensors"):
        LoraAdapter(model, write_adapter(tmp_path / "a.gguf", {}))
    with pytest.raises(ModelError, match="general"):
        LoraAdapter(model, model.path)


def test_stacks_of_experts_need_one_matrix_for_each(tmp_path):
    path = write_tiny_model(tmp_path / "moe.gguf", "qwen3moe", n_expert=4)
    moe = Model(path)
    stacks = random_matrices(path, lambda name: name == "blk.1.ffn_up_exps.weight")
    a, b = stacks["blk.1.ffn_up_exps.weight"]
    LoraAdapter(moe, write_adapter(tmp_path / "whole.gguf", stacks, architecture="qwen3moe"))
    for name, cut in (("3", (a[:3], b[:3])), ("1", (a[0], b[0])), ("uneven", (a, b[:3]))):
        file = write_adapter(tmp_path / f"{name}.gguf", {"blk.1.ffn_up_exps.weight": cut}, architecture="qwen3moe")
        with pytest.raises(ModelError, match="do not adapt"):
            LoraAdapter(moe, file)


def test_files_cut_or_flipped_anywhere_load_or_are_refused(model, matrices, tmp_path):
    whole = write_adapter(tmp_path / "whole.gguf", matrices).read_bytes()
    rng = np.random.default_rng(1)
    file = tmp_path / "damaged.gguf"
    for length in (0, 3, 24, *rng.integers(25, len(whole), 12).tolist()):
        file.write_bytes(whole[:length])
        with pytest.raises((GgufError, ModelError)):
            LoraAdapter(model, file)
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.integers(0, 2000, 3):
            data[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(data)
        with contextlib.suppress(PyllamaError):
            LoraAdapter(model, file)


def test_adapters_are_for_the_model_they_were_loaded_for(model, matrices, tmp_path):
    file = write_adapter(tmp_path / "a.gguf", matrices)
    other = Model(model.path)
    with pytest.raises(InvalidArgument, match="loaded for another model"):
        Engine(other, n_ctx=256, adapters=[LoraAdapter(model, file)])
    with pytest.raises((InvalidArgument, TypeError)):
        Engine(other, n_ctx=256, adapters=[None])
