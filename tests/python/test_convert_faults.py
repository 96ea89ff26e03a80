"""`convert-hf-to-gguf` on faulty input: one line, exit code 1, nothing left behind."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama.errors import PyllamaError
from pyllama.tools import convert_hf_to_gguf
from support import checkpoints
from support.checkpoints import CONFIGS, safetensors_bytes, write_checkpoint, write_json
from support.convert_program import failure, left_over

LLAMA = CONFIGS["llama"]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Tiny-Llama-1M-Chat-v2", LLAMA, dtype="BF16")


def test_values_beyond_f16_are_counted_and_nothing_is_left_behind(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = checkpoints.weights(LLAMA)
    tensors["model.layers.1.mlp.up_proj.weight"][3, :4] = [1e5, -7e4, 65504, np.inf]
    (llama / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    error = failure(capsys, llama, "--outtype", "f16")
    assert "'model.layers.1.mlp.up_proj.weight': 3 values" in error
    assert left_over(llama) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; supported are DFlashDraf",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"intermediate_size": 97}, "mlp.gate_proj.weight' has shape [96, 64], expected [97, 64]"),
        ({"num_hidden_layers": 3}, "missing 9 tensors (model.layers.2.input_layernorm.weight, "),
        ({"num_hidden_layers": 1}, "not part of a llama model: 9 tensors (model.layers.1."),
        ({"attention_bias": True}, "missing 8 tensors"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is 'gptq'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope', expected one of"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 2.0}}, "mscale is 2.0"),
    ],
)
def test_configurations_that_cannot_be_converted(
    llama: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    write_json(llama / "config.json", LLAMA | change)
    assert message in failure(capsys, llama)
    assert left_over(llama) == []


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("qwen3moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, expected at most the 6 experts"),
        ("qwen3moe", {"num_experts": 0}, "num_experts is 0"),
        ("qwen3moe", {"num_experts": 7}, "missing 6 tensors (model.layers.0.mlp.experts.6.down_proj.weight"),
        ("qwen3moe", {"num_experts": 5}, "not part of a qwen3moe model: 6 tensors"),
        ("qwen3moe", {"moe_intermediate_size": 16}, "expected [16, 64] by config.json"),
        ("mixtral", {"num_local_experts": 2}, "num_experts_per_tok is 3, expected at most the 2 experts"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma3", {"query_pre_attn_scalar": 32}, "query_pre_attn_scalar is 32.0, expected 16"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ("gemma3-capped", {"layer_types": ["full_attention"]}, "expected 3 times one of"),
        ("gemma3-capped", {"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "expected 3 times one of"),
        ("gemma3-capped", {"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_configurations_of_other_families_that_cannot_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], variant: str, change: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path, checkpoints.CONFIGS[variant])
    write_json(folder / "config.json", checkpoints.CONFIGS[variant] | change)
    assert message in failure(capsys, folder)


def test_llama3_scaling_is_refused_for_families_that_do_not_read_divisors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["qwen2"] | {"rope_scaling": CONFIGS["llama-llama3"]["rope_scaling"]}
    assert "rope_type is 'llama3', expected" in failure(capsys, write_checkpoint(tmp_path, config))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "no *.safetensors file"),
        ("tokenizer.json", "no tokenizer: expected tokenizer.json or tokenizer.model"),
    ],
)
def test_missing_files(llama: Path, capsys: pytest.CaptureFixture[str], missing: str, message: str) -> None:
    (llama / missing).unlink()
    assert message in failure(capsys, llama)


def test_pickled_checkpoint_is_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "can run code when they are read" in failure(capsys, llama)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": 1}}, "no weight_map"),
        ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors is missing"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is not a name within the folder"),
    ],
)
def test_unusable_index(llama: Path, capsys: pytest.CaptureFixture[str], index: Any, message: str) -> None:
    write_json(llama / "model.safetensors.index.json", index)
    assert message in failure(capsys, llama)


def with_header(header: str | dict[str, Any], data: bytes = bytes(64), length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are no safetensors file"),
        (with_header("{}", length=1 << 40), "the header claims 1099511627776 bytes of a file of 74"),
        (with_header("{}", b"", length=3), "the header claims 3 bytes"),
        (with_header("[]"), "not a JSON object"),
        (with_header("{"), "not valid JSON"),
        (with_header("[" * 100_000), "not valid JSON"),
        (with_header('{"a": {}, "a": {}}'), "'a' occurs twice"),
        (with_header({"a": 1}), "tensor 'a': expected dtype, shape and data_offsets"),
        (with_header({"a": entry(0, 8, [-2])}), "expected dtype, shape and data_offsets"),
        (with_header({"a": entry(0, 8, dtype="F4")}), "unknown dtype 'F4'"),
        (with_header({"a": entry(0, 68)}), "bytes 0 to 68 of a data section of 64 bytes"),
        (with_header({"a": entry(8, 4, [1])}), "bytes 8 to 4"),
        (with_header({"a": entry(0, 8, [3])}), "8 bytes for F32 of shape [3]"),
        (with_header({"a": entry(0, 8, [1 << 62, 1 << 62])}), "8 bytes for F32"),
        (with_header({"a": entry(0, 8), "b": entry(4, 12)}), "'a' and 'b' overlap"),
    ],
)
def test_malformed_safetensors(llama: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str) -> None:
    (llama / "model.safetensors").write_bytes(content)
    assert message in failure(capsys, llama)


def test_tensor_in_two_files_is_an_error(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama / "model-2.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    assert "is also in model-2.safetensors" in failure(capsys, llama)


def test_tensors_of_other_types_are_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = checkpoints.weights(LLAMA)
    span = [0, tensors["model.embed_tokens.weight"].nbytes]
    shape = [LLAMA["vocab_size"], LLAMA["hidden_size"]]
    wrong = {"model.embed_tokens.weight": {"dtype": "I32", "shape": shape, "data_offsets": span}}
    (llama / "model.safetensors").write_bytes(safetensors_bytes(tensors, **wrong))
    assert "has dtype I32, expected F32, F16, BF16" in failure(capsys, llama)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("/nonexistent",),
        ("FOLDER", "--outtype", "q4_0"),
        ("FOLDER", "--split-max-size", "5X"),
        ("FOLDER", "--split-max-tensors", "-1"),
        ("FOLDER", "--mmproj"),
    ],
)
def test_wrong_usage_is_one_line(llama: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    failure(capsys, *(str(llama) if argument == "FOLDER" else argument for argument in arguments))


ODD_VALUES = (None, -1, "x", [None], {"a": None}, 10**30, float("inf"))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every part of a JSON value; of a long list or object the first three."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    items = items if len(items) < 40 else items[:3]
    return [path, *(place for key, part in items for place in places(part, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], odd)
    return copy


def odd_documents() -> dict[str, dict[str, Any]]:
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processors = [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": single}]
    added = {"0": checkpoints.added_token(0, "<|endoftext|>")}
    named = [{"name": "default", "template": "x"}]
    return {
        "config.json": CONFIGS["llama-llama3"],
        "tokenizer.json": checkpoints.tokenizer_json(post_processor={"type": "Sequence", "processors": processors}),
        "tokenizer_config.json": checkpoints.TOKENIZER_CONFIG | {"added_tokens_decoder": added, "chat_template": named},
        "generation_config.json": {"eos_token_id": [2, 0], "top_k": 5, "temperature": 0.5},
        "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}},
        "added_tokens.json": {"<extra>": 300},
    }


@pytest.mark.parametrize("name", odd_documents())
def test_odd_values_anywhere_in_the_files_end_in_a_typed_error(llama: Path, name: str) -> None:
    documents = odd_documents()
    for other, value in documents.items():
        write_json(llama / other, value)
    refused = 0
    for place in places(documents[name]):
        for odd in ODD_VALUES:
            write_json(llama / name, replaced(documents[name], place, odd))
            try:
                assert convert_hf_to_gguf.main([str(llama), "--vocab-only", "--dry-run"]) == 0
            except PyllamaError:
                refused += 1
    assert refused > 0
