"""Launches of a decode step on the emulated device: row-wise work belongs to the products around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import Engine, Model
from support.cuda_engine import cuda_devices
from support.logits import position_logits
from support.tiny_hybrid import write_tiny_hybrid

UNITS = (
    "rows", "rows_panel", "row_moves", "panel", "repack", "kv_append", "delta_net", "delta_net_chunked", "causal_conv",
    "linear_f32", "linear_f16", "linear_row_f16", "linear_prompt_f16", "attention_decode_64", "attention_prompt_64",
)  # fmt: skip
FEED_FORWARD = ["after_norm", "gated_largest", "plain"]
DELTA_LAYER = ["after_norm", "delta_net_128", "after_norm_gate", *FEED_FORWARD]
ATTENTION_LAYER = [
    "after_norm", "rotate_and_append", "attention_decode_8", "attention_combine", "plain", *FEED_FORWARD,
]  # fmt: skip


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "launches"
    with cuda_devices(UNITS, EMULATED_CUDA_LAUNCHES=str(path)) as emulated:
        if not emulated:
            pytest.skip("only the emulated device tells what it runs")
        yield path


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return write_tiny_hybrid(
        tmp_path / "hybrid.gguf", n_layer=3, attention_interval=3, n_embd=256, head_dim=64, n_rot=32,
        rope_sections=(6, 5, 5, 0), n_key_head=1, n_value_head=2, state_size=128, weight_type="f16",
    )  # fmt: skip


def test_a_decoded_row_takes_six_launches_in_a_delta_layer_and_eight_where_a_layer_attends(
    launches: Path, hybrid: Path
) -> None:
    tokens = [3, 1, 4, 1, 5, 9]
    engine = Engine(Model(hybrid, devices=["CUDA0"]), n_ctx=256)
    together = position_logits(engine, tokens)
    engine.clear(0)
    alone = []
    for token in tokens:  # the first runs as it is, later ones become a graph
        launches.write_text("")
        engine.decode([token])
        alone.append(engine.logits()[-1])
        assert launches.read_text().split() == [*DELTA_LAYER, *DELTA_LAYER, *ATTENTION_LAYER, "after_norm"]
    assert np.array_equal(np.stack(alone).view(np.uint32), together.view(np.uint32))
