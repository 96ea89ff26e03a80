"""`Engine.shift`: keys turned back are the keys of the new positions; pages, sharing and refusals.

In a model of one layer keys and values depend on their own token and position only, so a shifted sequence must equal
one that was evaluated without the dropped tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama._engine import Engine, Model, backend_info
from pyllama.errors import ContextFull, InvalidArgument
from support.logits import assert_same_bits
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

PAGE = 256
N_TOKENS = 700
WINDOW = {"gemma3.attention.sliding_window": 40}
YARN = {
    "qwen2.rope.scaling.type": "yarn",
    "qwen2.rope.scaling.factor": 4.0,
    "qwen2.rope.scaling.original_context_length": 512,
}
# One layer each. In gemma3 the first layer is one with a window, unless there is none.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_freqs": np.linspace(1, 8, 16).tolist(), "n_head": 2},
    "qwen2-yarn": {"architecture": "qwen2", "metadata": YARN},
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "qwen3moe": {"architecture": "qwen3moe"},
    "gemma3-windowed": {"architecture": "gemma3", "head_dim": 32, "tied": True, "metadata": WINDOW},
    "gemma3": {"architecture": "gemma3", "head_dim": 32, "tied": True},
}


def write_variant(path: Path, name: str, n_layer: int = 1) -> Path:
    options = {"n_layer": n_layer, **VARIANTS[name]}
    return write_tiny_llama(path, **options) if name == "llama" else write_tiny_model(path, **options)


def random_tokens(n_tokens: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()


def append(engine: Engine, tokens: list[int], seq_id: int = 0) -> np.ndarray:
    """Logits after each of `tokens`."""
    engine.decode(tokens, [seq_id] * len(tokens), [True] * len(tokens))
    return engine.logits()


def new_engine(model: Model, **options: Any) -> Engine:
    return Engine(model, **{"n_ctx": 4 * PAGE, "n_seq_max": 3, "n_threads": 2, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers with head sizes that every KV type can hold."""
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "model.gguf", "qwen3", head_dim=32)
    model = Model(path)
    yield model
    model.close()


@pytest.mark.parametrize(("n_keep", "n_discard"), [(0, 300), (5, 1), (256, 256), (300, 130), (0, 699), (10, 690)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shifted_sequence_is_the_one_without_the_dropped_tokens(
    tmp_path: Path, variant: str, n_keep: int, n_discard: int
) -> None:
    model = Model(write_variant(tmp_path / "model.gguf", variant))
    tokens, following = random_tokens(N_TOKENS), random_tokens(30, seed=2)
    shifted, fresh, whole = (new_engine(model, type_k="f32", type_v="f32") for _ in range(3))
    for engine in (shifted, whole):
        engine.decode(tokens)
    shifted.shift(0, n_keep, n_discard)
    assert shifted.length(0) == N_TOKENS - n_discard
    kept = tokens[:n_keep] + tokens[n_keep + n_discard :]
    if kept:
        fresh.decode(kept)
    found, expected, unshifted = (append(engine, following) for engine in (shifted, fresh, whole))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    if "windowed" not in variant or n_discard > 660:  # else what was dropped is out of sight, the positions too
        assert np.abs(unshifted - expected).max() > 2e-3
    for engine in (shifted, fresh, whole):
        engine.close()
    model.close()


@pytest.mark.parametrize("types", [("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q8_0")])
def test_stored_keys_are_rounded_once_more(tmp_path: Path, types: tuple[str, str]) -> None:
    model = Model(write_variant(tmp_path / "model.gguf", "qwen3"))
    tokens, following = random_tokens(N_TOKENS), random_tokens(30, seed=2)
    shifted, fresh = (new_engine(model, type_k=types[0], type_v=types[1]) for _ in range(2))
    exact = new_engine(model, type_k="f32", type_v="f32")
    shifted.decode(tokens)
    shifted.shift(0, 100, 300)
    for engine in (fresh, exact):
        engine.decode(tokens[:100] + tokens[400:])
    found, once, expected = (append(engine, following) for engine in (shifted, fresh, exact))
    once_error, twice_error = (float(np.sqrt(np.mean((logits - expected) ** 2))) for logits in (once, found))
    assert 0 < twice_error < 2 * once_error  # two independent roundings: sqrt(2) times that of one
    for engine in (shifted, fresh, exact):
        engine.close()
    model.close()


@pytest.mark.parametrize("type_v", ["f16", "bf16", "q8_0", "q4_0"])
def test_values_move_without_being_rounded_again(tmp_path: Path, type_v: str) -> None:
    model = Model(write_variant(tmp_path / "model.gguf", "qwen3"))
    tokens, following = random_tokens(N_TOKENS), random_tokens(30, seed=2)
    shifted, fresh = (new_engine(model, type_k="f32", type_v=type_v) for _ in range(2))
    shifted.decode(tokens)
    shifted.shift(0, 100, 300)
    fresh.decode(tokens[:100] + tokens[400:])
    np.testing.assert_allclose(append(shifted, following), append(fresh, following), atol=2e-4)
    shifted.close()
    fresh.close()
    model.close()


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("bf16", "f16"), ("q8_0", "q4_0"), ("q4_0", "q8_0")])
def test_every_instruction_set_gives_the_same_bits(model: Model, types: tuple[str, str]) -> None:
    results = []
    for isa in backend_info()["available"]:
        chosen = Model(model.path, isa=isa)
        engine = new_engine(chosen, type_k=types[0], type_v=types[1])
        engine.decode(random_tokens(400))
        engine.shift(0, 3, 77)
        engine.shift(0, 0, 20)
        results.append(append(engine, random_tokens(5, seed=3)))
        engine.close()
        chosen.close()
    assert len(results) > 1
    for result in results[1:]:
        assert_same_bits(result, results[0], f"after a shift, {types}")


def test_sequences_that_share_pages_keep_theirs(model: Model) -> None:
    engine, alone = new_engine(model, n_ctx=8 * PAGE), new_engine(model, n_ctx=8 * PAGE)
    tokens, following = random_tokens(N_TOKENS), random_tokens(9, seed=4)
    for e in (engine, alone):
        e.decode(tokens)
    engine.fork(0, 1, N_TOKENS)
    engine.fork(0, 2, 400)
    free = engine.free_tokens()
    engine.shift(1, 100, 200)
    # 500 tokens are left, on two pages: both were shared, and are copies now; the third was let go.
    assert engine.free_tokens() == free - 2 * PAGE
    alone.fork(0, 1, N_TOKENS)
    alone.clear(0)
    alone.shift(1, 100, 200)
    assert_same_bits(append(engine, following, 1), append(alone, following, 1), "the shifted fork")
    alone.clear(1)
    alone.decode(tokens)
    assert_same_bits(append(engine, following, 0), append(alone, following, 0), "the source")
    alone.truncate(0, 400)
    assert_same_bits(append(engine, following, 2), append(alone, following, 0), "another fork")
    for seq_id in range(3):
        engine.clear(seq_id)
    assert engine.free_tokens() == (8 + 3) * PAGE
    engine.close()
    alone.close()


def test_many_shifts_keep_pages_and_lengths_and_save_like_any_sequence(model: Model) -> None:
    engine = new_engine(model)
    rng = np.random.default_rng(5)
    tokens = random_tokens(500)
    engine.decode(tokens)
    for _ in range(12):
        n_keep = int(rng.integers(0, 50))
        n_discard = int(rng.integers(1, len(tokens) - n_keep))
        engine.shift(0, n_keep, n_discard)
        del tokens[n_keep : n_keep + n_discard]
        added = random_tokens(int(rng.integers(1, 300)), seed=n_discard)[: 900 - len(tokens)]
        engine.decode(added)
        tokens += added
        assert engine.length(0) == len(tokens)
        assert engine.free_tokens() == (4 + 3 - -(-len(tokens) // PAGE)) * PAGE
    engine.load_sequence(1, engine.save_sequence(0))
    following = random_tokens(4, seed=6)
    assert_same_bits(append(engine, following, 1), append(engine, following, 0), "a saved shifted sequence")
    engine.close()


def test_moved_tokens_are_neither_reused_nor_kept(model: Model) -> None:
    """They have seen the dropped ones: what begins with the same tokens must not take them for its own."""
    engine = new_engine(model, cache_bytes=-1)
    tokens = random_tokens(N_TOKENS)
    engine.decode(tokens)
    engine.shift(0, 300, 100)
    engine.fork(0, 2, 350)
    kept = tokens[:300] + tokens[400:]
    assert engine.reuse_prefix(1, kept, len(kept)).length == 300
    assert engine.reuse_prefix(2, kept, len(kept)).length == 300
    engine.release(0)
    engine.clear(1)
    engine.clear(2)
    assert engine.reuse_prefix(0, kept, len(kept)).length == 300
    # What follows a cut to the tokens in place is in place again.
    engine.decode(kept[300:])
    engine.shift(0, 200, 10)
    engine.truncate(0, 200)
    engine.decode(kept[200:])
    assert engine.reuse_prefix(1, kept, len(kept)).length == len(kept)
    engine.close()


def test_threads_do_not_change_the_bits(model: Model) -> None:
    results = []
    for n_threads in (1, 4):
        engine = new_engine(model, n_threads=n_threads)
        engine.decode(random_tokens(N_TOKENS))
        engine.shift(0, 33, 333)
        results.append(append(engine, random_tokens(5, seed=3)))
        engine.close()
    assert_same_bits(results[1], results[0], "threads")


def test_a_refused_shift_changes_nothing(model: Model) -> None:
    engine = new_engine(model, n_ctx=2 * PAGE, n_seq_max=2)
    engine.decode(random_tokens(2 * PAGE))
    engine.fork(0, 1, 2 * PAGE)
    state = engine.save_sequence(1)
    for n_keep, n_discard in ((-1, 5), (0, 0), (0, -3), (0, 513), (500, 13), (513, 1), (2**31 - 1, 2**31 - 1)):
        with pytest.raises(InvalidArgument, match="sequence 1 holds 512 tokens"):
            engine.shift(1, n_keep, n_discard)
    with pytest.raises(InvalidArgument, match="sequence 2 is unknown"):
        engine.shift(2, 0, 1)
    assert engine.save_sequence(1) == state
    # Both sequences share two pages and all others are taken: no room for copies.
    engine.close()
    engine = new_engine(model, n_ctx=2 * PAGE, n_seq_max=3)
    engine.decode(random_tokens(2 * PAGE))
    engine.fork(0, 1, 2 * PAGE)
    engine.decode(random_tokens(3 * PAGE), [2] * (3 * PAGE))
    state = engine.save_sequence(1)
    with pytest.raises(ContextFull):
        engine.shift(1, 0, 10)
    assert engine.save_sequence(0) == engine.save_sequence(1) == state
    engine.clear(2)
    engine.shift(1, 0, 10)
    assert engine.save_sequence(0) == state
    engine.close()


def test_models_that_cannot_shift_say_so(tmp_path: Path, model: Model) -> None:
    assert new_engine(model).can_shift
    hybrid = Model(write_tiny_hybrid(tmp_path / "hybrid.gguf"))
    engine = Engine(hybrid, n_ctx=PAGE)
    assert not engine.can_shift
    engine.decode(random_tokens(20))
    with pytest.raises(InvalidArgument, match="qwen35"):
        engine.shift(0, 0, 10)
    assert engine.length(0) == 20
    engine.close()
    hybrid.close()
