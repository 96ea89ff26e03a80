"""Control vectors: directions that are added to the residual stream after layers, and files that are refused.

The oracle: adding v after layer N is adding a constant to the output of its feed-forward, which a bias of `ffn_down`
does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import ControlVector, Engine, Model
from pyllama.errors import InvalidArgument, ModelError
from support.adapters import write_control_vector
from support.logits import assert_same_bits, position_logits
from support.rewritten_gguf import rewrite
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_qwen4exp import write_tiny_qwen4exp

TOKENS = np.random.default_rng(78).integers(3, 290, 24).tolist()
N_EMBD, N_LAYER = 64, 4
RNG = np.random.default_rng(4)
FIRST = {layer: RNG.standard_normal(N_EMBD).astype(np.float32) for layer in (1, 2, 3)}
SECOND = {layer: RNG.standard_normal(N_EMBD).astype(np.float32) for layer in (2,)}


def logits_of(path: Path, control: Callable[[Model], ControlVector | None], **placement: Any) -> NDArray[np.float32]:
    model = Model(path, **placement)
    engine = Engine(model, n_ctx=256, n_threads=2, type_k="f32", type_v="f32", control=control(model))
    logits = position_logits(engine, TOKENS)
    engine.close()
    model.close()
    return logits


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("control")
    return (
        write_tiny_llama(folder / "model.gguf", n_layer=N_LAYER),
        write_control_vector(folder / "1.gguf", FIRST),
        write_control_vector(folder / "2.gguf", SECOND),
    )


def biased(model: Path, target: Path, directions: dict[int, NDArray[Any]]) -> Path:
    extra = {f"blk.{layer}.ffn_down.bias": values.astype(np.float32) for layer, values in directions.items()}
    return rewrite(model, target, extra=extra)


@pytest.mark.parametrize(
    ("layers", "scales"),
    [((0, 0), (0.5,)), ((2, 3), (1.0, -0.7)), ((1, 2), (0.4, 0.4)), ((3, 0), (1.0,)), ((0, 99), (1.0,))],
)
def test_directions_are_added_after_the_layers_of_the_range(files, tmp_path, layers, scales):
    path, *vectors = files
    chosen = list(zip(vectors, scales, strict=False))
    first, last = layers[0] or 1, layers[1] or N_LAYER - 1
    sums = {
        layer: scales[0] * FIRST[layer] + (scales[1] * SECOND[2] if layer == 2 and len(scales) > 1 else 0)
        for layer in range(first, min(last, N_LAYER - 1) + 1)
    }
    expected = logits_of(biased(path, tmp_path / "b.gguf", sums), lambda model: None)
    for placement in ({}, {"devices": ("CPU0", "CPU1"), "split_mode": "tensor"}, {"isa": "reference"}):
        found = logits_of(
            path, lambda model: ControlVector(model, chosen, first_layer=layers[0], last_layer=layers[1]), **placement
        )
        assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    plain = logits_of(path, lambda model: None)
    assert np.abs(plain - expected).max() > 0.1, "the vectors must matter"


def test_layers_split_over_ranks_give_the_same_bits(files):
    path, vector, _ = files
    alone = logits_of(path, lambda model: ControlVector(model, [(vector, 1.0)]))
    split = logits_of(
        path, lambda model: ControlVector(model, [(vector, 1.0)]), devices=("CPU0", "CPU1"), split_mode="layer"
    )
    assert_same_bits(split, alone, "layers over ranks")


def test_hybrids_are_steered_after_recurrent_layers_too(tmp_path):
    path = write_tiny_hybrid(tmp_path / "model.gguf")
    vector = write_control_vector(tmp_path / "v.gguf", {1: FIRST[1], 3: FIRST[3]})
    plain = logits_of(path, lambda model: None)
    for layer in (1, 3):
        steered = logits_of(path, partial(ControlVector, files=[(vector, 1.0)], first_layer=layer, last_layer=layer))
        assert np.abs(steered - plain).max() > 0.1


def test_saved_sequences_belong_to_the_control_vector(files):
    path, vector, _ = files
    model = Model(path)
    steered = Engine(model, n_ctx=256, control=ControlVector(model, [(vector, 1.0)]))
    plain = Engine(model, n_ctx=256)
    steered.decode(TOKENS, [0] * len(TOKENS))
    saved = steered.save_sequence(0)
    with pytest.raises(InvalidArgument, match="control vector"):
        plain.load_sequence(0, saved)
    steered.load_sequence(0, saved)
    for engine in (steered, plain):
        engine.close()


def test_files_and_ranges_that_do_not_fit_are_refused(files, tmp_path):
    path, vector, _ = files
    model = Model(path)

    def refused(directions: dict[Any, NDArray[Any]], message: str) -> None:
        file = write_control_vector(tmp_path / "v.gguf", directions)
        with pytest.raises(ModelError, match=message):
            ControlVector(model, [(file, 1.0)])

    refused({}, "without directions")
    refused({0: FIRST[1]}, "direction.0 is for layer 0, the model takes directions for layers 1 to 3")
    refused({4: FIRST[1]}, "direction.4 is for layer 4")
    refused({"99999999999": FIRST[1]}, "is not a direction")
    refused({"1x": FIRST[1]}, "direction.1x is not a direction")
    refused({1: FIRST[1][:32]}, "has 32 values, the model has 64 features")
    for arguments, message in (
        ({"first_layer": -1}, "cannot be added to layers -1 to 0"),
        ({"first_layer": 3, "last_layer": 2}, "cannot be added to layers 3 to 2"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            ControlVector(model, [(vector, 1.0)], **arguments)
    with pytest.raises(InvalidArgument, match="not finite"):
        ControlVector(model, [(vector, float("nan"))])
    other = Model(write_tiny_qwen4exp(tmp_path / "streams.gguf"))
    with pytest.raises(ModelError, match="one residual stream"):
        ControlVector(other, [(vector, 1.0)])
