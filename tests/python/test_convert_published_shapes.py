"""`convert-hf-to-gguf` on checkpoints of the published sizes: sparse files of hundreds of gigabytes without content.

The numbers of parameters are those that the models are known to have.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama.convert import Conversion
from support.checkpoints import write_json, write_tokenizer
from support.hybrid_checkpoints import HYBRID_CONFIGS, hybrid_weights

_ROPE = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 10000000.0}
_COMMON: dict[str, Any] = {
    **{"vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144, "eos_token_id": 248044},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16},
    **{"layer_types": None, "full_attention_interval": 4, "mtp_num_hidden_layers": 1},
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
}
DENSE_27B = {
    **HYBRID_CONFIGS["qwen35"],
    **_COMMON,
    **{"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "linear_num_value_heads": 48},
    **{"num_attention_heads": 24, "num_key_value_heads": 4},
}
EXPERTS_35B = {
    **HYBRID_CONFIGS["qwen35moe"],
    **_COMMON,
    **{"hidden_size": 2048, "num_hidden_layers": 40, "linear_num_value_heads": 32, "mtp_num_hidden_layers": 0},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
FLASH_NEXT = {
    **HYBRID_CONFIGS["qwen4exp"],
    **_COMMON,
    **{"hidden_size": 2560, "num_hidden_layers": 48, "linear_num_value_heads": 48},
    **{"num_attention_heads": 24, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
    **{"moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "hc_lowrank": 320},
    **{"indexer_n_heads": 4, "indexer_head_dim": 128, "indexer_budget": 2048, "ple_embed_dim": 2560},
    **{"heads_per_ngram": 8, "ngram_vocab_size_base": 20000000, "make_ngram_vocab_size_divisible_by": 128},
    "split_ngram_parts": 128,
}


def write_sparse_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """BF16 throughout; only the integers have content."""
    tensors = hybrid_weights(config, shapes_only=True)
    header: dict[str, Any] = {}
    content, offset = b"", 0
    for name in sorted(tensors, key=lambda name: tensors[name].dtype != np.int64):
        values = tensors[name]
        is_integer = values.dtype == np.int64
        n_bytes = values.size * (8 if is_integer else 2)
        content += values.tobytes() if is_integer else b""
        header[name] = {"dtype": "I64" if is_integer else "BF16", "shape": list(values.shape)}
        header[name]["data_offsets"] = [offset, offset + n_bytes]
        offset += n_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + content)
        file.truncate(8 + len(text) + offset)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def flash_next(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversion]:
    with Conversion(write_sparse_checkpoint(tmp_path_factory.mktemp("flash-next"), FLASH_NEXT)) as conversion:
        yield conversion


def assert_parameters(conversion: Conversion, n_blocks: int, n_parameters: int, n_mtp: int) -> None:
    """n_blocks: the prediction block is the one behind them. n_parameters: without it."""
    assert conversion.n_parameters == n_parameters + n_mtp
    in_mtp = [tensor.n_elements for tensor, _ in conversion.tensors if tensor.name.startswith(f"blk.{n_blocks}.")]
    assert sum(in_mtp) == n_mtp
    n_bytes = sum(spec.n_bytes for _, spec in conversion.tensors)
    assert 2 * conversion.n_parameters < n_bytes < 2.02 * conversion.n_parameters


@pytest.mark.parametrize(
    ("config", "n_parameters", "n_mtp"),
    [(DENSE_27B, 26_895_998_464, 424_699_392), (EXPERTS_35B, 34_660_610_688, 0)],
    ids=["27b", "35b-a3b"],
)
def test_published_hybrid_has_its_number_of_parameters(
    tmp_path: Path, config: dict[str, Any], n_parameters: int, n_mtp: int
) -> None:
    with Conversion(write_sparse_checkpoint(tmp_path, config)) as conversion:
        assert_parameters(conversion, config["num_hidden_layers"], n_parameters, n_mtp)


def test_flash_next_has_its_number_of_parameters(flash_next: Conversion) -> None:
    assert_parameters(flash_next, 48, 125_743_653_760 + 51_200_245_760, 2_607_150_848)


def test_hash_of_the_published_table(flash_next: Conversion) -> None:
    keys = {entry.key.removeprefix("qwen4exp."): entry.value for entry in flash_next.key_values}
    shapes = {tensor.name: tensor.shape for tensor, _ in flash_next.tensors}
    assert keys["ple.layer_multipliers"] == [23703573157769, 20109073645365, 8052911324071]
    assert keys["ple.head_vocab_sizes"][::5] == [20000003, 20000063, 20000107, 20000171]
    assert keys["ple.head_offsets"][:2] == [0, 20000003]
    assert shapes["per_layer_token_embd.weight"] == (320_001_536, 160)
    assert keys["block_count"] == 49
    assert keys["rope.dimension_count"] == 64
