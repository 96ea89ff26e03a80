"""`convert-hf-to-gguf` for qwen3_5, qwen3_5_moe and qwen4_exp: metadata, prediction blocks, n-gram tables, faults."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import GgufFile
from pyllama.convert import output
from support import checkpoints
from support.checkpoints import CONFIGS, safetensors_bytes, tokenizer_json, write_checkpoint, write_json
from support.convert_program import failure, left_over, run
from support.hybrid_checkpoints import hash_numbers, hybrid_weights

NGRAMS = "model.layers.1.ple.ple_embedding."
QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(folder: Path, *arguments: str | Path) -> GgufFile:
    path = folder / "out.gguf"
    assert run(folder, "--outtype", "f32", "--outfile", path, *arguments) == 0
    return GgufFile(path)


def own_keys(file: GgufFile) -> dict[str, Any]:
    prefix = file.metadata["general.architecture"] + "."
    return {
        key.removeprefix(prefix): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }


def contents(file: GgufFile) -> dict[str, bytes]:
    return {tensor.name: bytes(file.tensor_bytes(tensor.name)) for tensor in file.tensors}


def replace_tensors(folder: Path, tensors: Mapping[str, NDArray[Any]], **header_changes: Any) -> None:
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, **header_changes))


def test_metadata_of_a_dense_hybrid(tmp_path: Path) -> None:
    assert own_keys(convert(write_checkpoint(tmp_path, CONFIGS["qwen35-multimodal-tied"]))) == {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "attention.recurrent_layers": [True, False, True, False, False],
        "full_attention_interval": 2,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 96,
        "vocab_size": 304,
    }


def test_metadata_of_experts(tmp_path: Path) -> None:
    keys = own_keys(convert(write_checkpoint(tmp_path, CONFIGS["qwen35moe"])))
    assert {key: value for key, value in keys.items() if "expert" in key or "feed" in key} == {
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 48,
    }


def test_metadata_of_streams_indexer_and_ngrams(tmp_path: Path) -> None:
    """The numbers of the hash need more bits than a float has."""
    config = CONFIGS["qwen4exp"] | {"image_token_id": 300, "eos_token_id": [2, 1]}
    multipliers, offsets, sizes = hash_numbers(config)
    assert max(multipliers) > 1 << 53
    keys = own_keys(convert(write_checkpoint(tmp_path, config)))
    beyond_experts = ("hyper_connection", "attention.indexer", "attention.compress", "ple", "embedding_length_per")
    assert {key: value for key, value in keys.items() if key.startswith(beyond_experts)} == {
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 24,
        "attention.indexer.head_count": 8,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 16,
        "attention.compress_ratios": [0, 0, 4, 4, 4],
        "ple.layers": [1],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 4,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 2,  # the first of several is the one that is hashed
        "ple.image_token_id": 300,
        "ple.layer_multipliers": multipliers,
        "ple.head_offsets": offsets,
        "ple.head_vocab_sizes": sizes,
        "embedding_length_per_layer_input": 8,
    }


def test_model_without_ngrams_has_no_keys_or_tensors_of_them(tmp_path: Path) -> None:
    file = convert(write_checkpoint(tmp_path, CONFIGS["qwen4exp-multimodal-plain"]))
    names = [*own_keys(file), *(tensor.name for tensor in file.tensors)]
    assert [name for name in names if "ple" in name or "per_layer" in name] == []


def test_pre_tokenizer_is_recognised(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen35-multimodal-tied"], tokenizer=tokenizer_json(QWEN35_PATTERN))
    assert convert(folder).metadata["tokenizer.ggml.pre"] == "qwen35"
    assert convert(folder, "--vocab-only").metadata["qwen35.block_count"] == 5


@pytest.mark.parametrize("variant", ["qwen35-multimodal-tied", "qwen35moe", "qwen4exp"])
def test_prediction_blocks_can_be_left_out_or_stand_alone(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[variant])
    whole = convert(folder)
    keys, tensors = own_keys(whole), contents(whole)
    without = convert(folder, "--no-mtp")
    assert contents(without) == {name: data for name, data in tensors.items() if not name.startswith("blk.4.")}
    short = {"attention.recurrent_layers", "attention.compress_ratios"} & keys.keys()
    assert own_keys(without) | {"nextn_predict_layers": 1} == (
        keys | {"block_count": 4} | {key: keys[key][:4] for key in short}
    )
    alone = convert(folder, "--mtp")
    assert contents(alone) == {
        name: data for name, data in tensors.items() if name[:6] in ("blk.4.", "token_", "output")
    }
    assert own_keys(alone) == keys


def test_prediction_blocks_alone_are_named_for_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "Tiny-Next-v1", CONFIGS["qwen35moe"])
    assert run(folder, "--mtp", "--outtype", "f16") == 0
    assert [name[:10] for name in left_over(folder)] == ["mtp-Tiny-N"]


def test_lost_prediction_blocks_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen35moe"])
    kept = {name: values for name, values in hybrid_weights(CONFIGS["qwen35moe"]).items() if not name.startswith("mtp")}
    replace_tensors(folder, kept)
    assert own_keys(convert(folder))["block_count"] == 4
    assert "lacks its block for multi-token prediction" in capsys.readouterr().err
    assert "no block for multi-token prediction" in failure(capsys, folder, "--mtp")
    capsys.readouterr()
    convert(folder, "--no-mtp")
    assert "multi-token" not in capsys.readouterr().err


def test_prediction_blocks_that_the_configuration_does_not_name_are_kept(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen35moe"])
    write_json(folder / "config.json", CONFIGS["qwen35moe"] | {"mtp_num_hidden_layers": None})
    assert own_keys(convert(folder))["nextn_predict_layers"] == 1


@pytest.mark.parametrize("option", ["--mtp", "--no-mtp"])
def test_other_models_have_no_prediction_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"])
    assert "llama models have no blocks for multi-token prediction" in failure(capsys, folder, option)


def test_prediction_blocks_alone_and_left_out_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen35moe"])
    assert "--mtp and --no-mtp exclude each other" in failure(capsys, folder, "--mtp", "--no-mtp")


def test_experts_stored_apart_and_together_give_the_same_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen35moe-apart"])
    apart = contents(convert(folder))
    weights = checkpoints.weights(CONFIGS["qwen35moe-apart"])
    together = {name: values for name, values in weights.items() if ".experts." not in name}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."
        stacked = {
            kind: np.stack([weights[f"{experts}{expert}.{kind}_proj.weight"] for expert in range(6)])
            for kind in ("gate", "up", "down")
        }
        together[experts + "gate_up_proj"] = np.concatenate([stacked["gate"], stacked["up"]], axis=1)
        together[experts + "down_proj"] = stacked["down"]
    replace_tensors(folder, together)
    assert contents(convert(folder)) == apart


def test_table_in_one_piece_gives_the_same_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen4exp"])
    shards = contents(convert(folder))
    tensors = checkpoints.weights(CONFIGS["qwen4exp"])
    parts = [tensors.pop(f"{NGRAMS}ngram_embedding.shard_{part}.weight") for part in range(4)]
    replace_tensors(folder, tensors | {NGRAMS + "ngram_embedding.weight": np.concatenate(parts)})
    assert contents(convert(folder)) == shards


@pytest.mark.parametrize("variant", ["qwen35-wide-heads", "qwen35moe", "qwen4exp", "llama"])
def test_size_of_the_pieces_does_not_change_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[variant], dtype="BF16")
    expected = contents(convert(folder))
    for n_bytes in (700, 5000):
        monkeypatch.setattr(output, "SLAB_BYTES", n_bytes)
        assert contents(convert(folder)) == expected


def test_halves_of_different_types_are_joined(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen4exp"])
    tensors = checkpoints.weights(CONFIGS["qwen4exp"])
    hidden = tensors["mtp.fc_hidden.weight"].astype(np.float16)
    replace_tensors(folder, tensors | {"mtp.fc_hidden.weight": hidden})
    found = np.frombuffer(convert(folder).tensor_bytes("blk.4.nextn.eh_proj.weight"), np.float32).reshape(64, 128)
    np.testing.assert_array_equal(found, np.concatenate([tensors["mtp.fc_embedding.weight"], hidden], axis=1))


def test_large_table_passes_in_pieces(tmp_path: Path) -> None:
    config = CONFIGS["qwen4exp"] | {"mtp_num_hidden_layers": None}
    folder = write_checkpoint(tmp_path, config)
    rows, shards = 1 << 22, 4
    tensors = {name: values for name, values in hybrid_weights(config).items() if "ngram_embedding" not in name}
    start = sum(values.nbytes for values in tensors.values())
    size = rows * 8 * 2
    spans = [(start + shard * size // shards, start + (shard + 1) * size // shards) for shard in range(shards)]
    table = {
        f"{NGRAMS}ngram_embedding.shard_{shard}.weight": {
            **{"dtype": "BF16", "shape": [rows // shards, 8]},
            "data_offsets": list(span),
        }
        for shard, span in enumerate(spans)
    }
    replace_tensors(folder, tensors, **table)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + size)  # zeros that take no room
    tracemalloc.start()
    file = convert(folder, "--outtype", "bf16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = {tensor.name: tensor.n_bytes for tensor in file.tensors}
    assert found["per_layer_token_embd.weight"] == size
    assert peak < size * 0.75


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        (
            "qwen35",
            {"layer_types": ["linear_attention"] * 3 + ["mamba2"]},
            "expected 4 times one of linear_attention, ",
        ),
        ("qwen35", {"layer_types": ["linear_attention"]}, "expected 4 times one of"),
        ("qwen35", {"linear_num_value_heads": 5}, "linear_num_value_heads is 5, expected a multiple of 2"),
        ("qwen35", {"linear_key_head_dim": 32}, "linear_key_head_dim is 32, expected 16"),
        ("qwen35", {"linear_num_value_heads": 4}, "in_proj_qkv.weight' has shape [160, 64], expected [128, 64]"),
        ("qwen35", {"linear_conv_kernel_dim": 3}, "conv1d.weight' has shape [160, 1, 4], expected [160, 1, 3]"),
        ("qwen35", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen35", {"rope_parameters": {"partial_rotary_factor": 0.01}}, "partial_rotary_factor is 0.01"),
        ("qwen35", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ("qwen35", {"rope_parameters": {"mrope_section": [1, 1, 1, 1, 1]}}, "mrope_section is [1, 1, 1, 1, 1]"),
        ("qwen35", {"rope_parameters": {"mrope_section": "11"}}, "mrope_section is '11', expected a list of numbers"),
        ("qwen35", {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved is False"),
        ("qwen35", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, expected at most 1"),
        ("qwen35", {"num_hidden_layers": 5, "layer_types": None}, "missing 14 tensors (model.layers.4."),
        ("qwen35-multimodal-tied", {"text_config": 3}, "text_config is 3, expected an object"),
        ("qwen35moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen35moe", {"num_experts": 5}, "mlp.gate.weight' has shape [6, 64], expected [5, 64]"),
        ("qwen35moe", {"shared_expert_intermediate_size": 32}, "has shape [48, 64], expected [32, 64]"),
        ("qwen4exp", {"output_gate_type": None}, "output_gate_type is 'silu', expected 'sigmoid'"),
        ("qwen4exp", {"hc_count": 1}, "hc_count is 1"),
        ("qwen4exp", {"hc_lowrank": 23}, "input_mix_weight_down.weight' has shape [24, 256], expected [23, 256]"),
        ("qwen4exp", {"indexer_n_heads": None}, "indexer_n_heads is missing"),
        ("qwen4exp", {"indexer_kv_heads": 2}, "indexer_kv_heads is 2"),
        ("qwen4exp", {"indexer_compress_ratio": 3}, "indexer_compress_ratio is 3, expected a divisor of 16"),
        ("qwen4exp", {"indexer_head_dim": 4}, "indexer_head_dim is 4, expected room for 8"),
        ("qwen4exp", {"ple_layer_ids": [1, 2]}, "ple_layer_ids is [1, 2]"),
        ("qwen4exp", {"ple_layer_ids": [3]}, "ple_layer_ids is [3], expected one layer, of linear attention"),
        ("qwen4exp", {"ple_layer_ids": [1]}, "missing"),
        ("qwen4exp", {"ple_embed_dim": 60}, "ple_embed_dim is 60, expected a multiple of 8"),
        ("qwen4exp", {"ngram_size": 9}, "ngram_size is 9"),
        ("qwen4exp", {"heads_per_ngram": 33}, "heads_per_ngram is 33"),
        ("qwen4exp", {"eos_token_id": None}, "eos_token_id is None"),
    ],
)
def test_configurations_that_cannot_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], variant: str, change: dict[str, Any], message: str
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[variant])
    write_json(folder / "config.json", CONFIGS[variant] | change)
    assert message in failure(capsys, folder)
    assert left_over(folder) == []


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("layer_multipliers", None, "layer_multipliers"),
        ("layer_multipliers", np.ones(3, np.float32), "is F32 of shape [3], expected I64 of shape [3]"),
        ("layer_multipliers", np.ones(2, np.int64), "is I64 of shape [2], expected I64 of shape [3]"),
        ("layer_multipliers", np.array([1, -3, 5]), "layer_multipliers' holds -3"),
        ("ngram_heads_vocab_sizes", np.array([53, 59, 61, 67, 71, 73, 79, 0]), "ngram_heads_vocab_sizes' holds 0"),
        ("ngram_heads_offsets", np.full(8, 1 << 40), "n-gram rows go up to"),
        ("ngram_embedding.shard_3.weight", None, "n-gram rows go up to 546, the table has 420"),
        ("ngram_embedding.shard_1.weight", None, "shard_1.weight"),
        ("ngram_embedding.shard_1.weight", np.zeros((140, 9), np.float32), "has shape [140, 9], expected [140, 8]"),
        ("ngram_embedding.shard_1.weight", np.zeros(1120, np.float32), "has shape [1120], expected [1120, 8]"),
    ],
)
def test_faulty_ngram_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, values: NDArray[Any] | None, message: str
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen4exp"])
    tensors = checkpoints.weights(CONFIGS["qwen4exp"])
    tensors.pop(NGRAMS + name)
    replace_tensors(folder, tensors if values is None else tensors | {NGRAMS + name: values})
    assert message in failure(capsys, folder)
    assert left_over(folder) == []


def test_unknown_tensors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen35"])
    odd = {"model.layers.0.linear_attn.in_proj_ba.weight": np.zeros((4, 4), np.float32)}
    replace_tensors(folder, checkpoints.weights(CONFIGS["qwen35"]) | odd)
    assert "not part of a qwen35 model: tensor model.layers.0.linear_attn.in_proj_ba.weight" in failure(capsys, folder)
