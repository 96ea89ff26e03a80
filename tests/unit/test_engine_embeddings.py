"""`Engine.embed`: pooling is exact, whatever the chunks and the company; refused calls change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import EmbeddingWork, Engine, HiddenPool, Model, Work, pooling_types
from pyllama.errors import ContextFull, InvalidArgument, ModelError
from support.logits import assert_same_bits, position_logits
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

PAGE = 256
N_TOKENS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A reranker, so that every pooling type works."""
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "reranker.gguf", "qwen3", n_labels=3)
    model = Model(path)
    yield model
    model.close()


@pytest.fixture(scope="module")
def text(model: Model) -> list[int]:
    return np.random.default_rng(7).integers(3, model.n_vocab, N_TOKENS).tolist()


def new_engine(model: Model, n_ubatch: int = 64) -> Engine:
    return Engine(model, n_ctx=4 * PAGE, n_seq_max=3, n_ubatch=n_ubatch)


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    engine = new_engine(model)
    yield engine
    engine.close()


def pool_of(model: Model, pooling_type: str = "mean") -> HiddenPool:
    return HiddenPool(pooling_type, model.n_embd)


def embedding(engine: Engine, model: Model, tokens: list[int], pooling_type: str, chunk: int = 10_000) -> np.ndarray:
    engine.clear(0)
    pool = pool_of(model, pooling_type)
    for start in range(0, len(tokens), chunk):
        engine.embed([EmbeddingWork(0, tokens[start : start + chunk], pool, start + chunk >= len(tokens))])
    assert pool.is_complete
    assert pool.n_tokens == len(tokens) == engine.length(0)
    return pool.values()


def test_poolings_are_what_their_names_say(engine: Engine, model: Model, text: list[int]) -> None:
    states = embedding(engine, model, text, "none")
    assert states.shape == (N_TOKENS, model.n_embd)
    assert len(np.unique(states, axis=0)) == N_TOKENS
    mean = states.astype(np.float64).cumsum(axis=0)[-1] / N_TOKENS
    assert_same_bits(embedding(engine, model, text, "mean"), mean.astype(np.float32), "mean")
    assert_same_bits(embedding(engine, model, text, "cls"), states[0], "cls")
    assert_same_bits(embedding(engine, model, text, "last"), states[-1], "last")
    labels = embedding(engine, model, text, "rank")
    assert labels.shape == (3,)
    assert labels.sum() == pytest.approx(1.0)


def test_hidden_states_are_those_that_the_head_turns_into_logits(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", tied=True)
    model = Model(path)
    engine = Engine(model, n_ctx=512)
    tokens = list(range(20, 60))
    logits = position_logits(engine, tokens)
    states = embedding(engine, model, tokens, "none")
    import gguf

    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    np.testing.assert_allclose(states @ tensors["token_embd.weight"].T, logits, rtol=1e-3, atol=1e-4)
    engine.close()
    model.close()


@pytest.mark.parametrize("pooling_type", pooling_types)
def test_embeddings_depend_on_neither_chunks_nor_ubatches_nor_company(
    model: Model, text: list[int], pooling_type: str
) -> None:
    whole, small = new_engine(model, n_ubatch=512), new_engine(model, n_ubatch=7)
    expected = embedding(whole, model, text, pooling_type)
    for engine, chunk in ((whole, 100), (small, 10_000), (small, 256), (whole, 1)):
        assert_same_bits(embedding(engine, model, text, pooling_type, chunk), expected, f"chunks of {chunk}")
    pools = [pool_of(model, pooling_type), pool_of(model, "none"), pool_of(model, "rank")]
    for engine in (whole, small):
        for sequence in range(3):
            engine.clear(sequence)
        pools = [pool_of(model, "none"), pool_of(model, pooling_type), pool_of(model, "rank")]
        engine.embed([EmbeddingWork(i, [text[5:20], text, text[:9]][i], pools[i]) for i in range(3)])
        assert_same_bits(pools[1].values(), expected, "in company")
    whole.close()
    small.close()


def test_sequences_of_embeddings_can_be_continued_by_steps(engine: Engine, model: Model, text: list[int]) -> None:
    expected = position_logits(engine, text)[-1]
    embedding(engine, model, text[:-1], "mean")
    engine.step([Work(0, text[-1:])])
    assert engine.length(0) == N_TOKENS
    engine.truncate(0, N_TOKENS - 1)
    engine.decode(text[-1:])
    assert_same_bits(engine.logits()[0], expected, "logits after an embedding")


def test_refused_work_changes_nothing(engine: Engine, model: Model, text: list[int]) -> None:
    pool, fresh = pool_of(model), pool_of(model)
    engine.embed([EmbeddingWork(0, text[:10], pool, False)])
    before = pool.values()
    complete = pool_of(model)
    engine.embed([EmbeddingWork(1, text[:4], complete)])
    for work, message in (
        ([EmbeddingWork(0, [], pool)], "no tokens"),
        ([EmbeddingWork(0, [3], None)], "no pool"),  # type: ignore[arg-type]
        ([EmbeddingWork(0, [model.n_vocab], pool)], "outside the vocabulary"),
        ([EmbeddingWork(3, [3], fresh)], "unknown"),
        ([EmbeddingWork(2, [3], fresh), EmbeddingWork(2, [3], pool_of(model))], "appears twice"),
        ([EmbeddingWork(0, [3], pool), EmbeddingWork(2, [3], pool)], "pool of another item"),
        ([EmbeddingWork(0, [3], fresh)], "the sequence holds 10"),
        ([EmbeddingWork(2, [3], pool)], "the sequence holds 0"),
        ([EmbeddingWork(1, [3], complete)], "a complete text"),
        ([EmbeddingWork(2, [3], HiddenPool("mean", model.n_embd + 1))], "features"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            engine.embed(work)
    with pytest.raises(ContextFull):
        engine.embed([EmbeddingWork(0, text * 8, pool), EmbeddingWork(2, [3], fresh)])
    assert [engine.length(sequence) for sequence in range(3)] == [10, 4, 0]
    assert (pool.n_tokens, fresh.n_tokens) == (10, 0)
    assert_same_bits(pool.values(), before, "pool after refusals")
    engine.embed([EmbeddingWork(0, text[10:], pool)])
    assert_same_bits(pool.values(), embedding(new_engine(model), model, text, "mean"), "resumed")


def test_ranking_needs_a_classification_head(tmp_path: Path) -> None:
    model = Model(write_tiny_llama(tmp_path / "model.gguf"))
    engine = Engine(model, n_ctx=512)
    assert (model.n_labels, model.pooling_type) == (0, "none")
    with pytest.raises(InvalidArgument, match=r"cls\.output\.weight"):
        engine.embed([EmbeddingWork(0, [5], pool_of(model, "rank"))])
    engine.close()
    model.close()


def test_pools_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="'average' is not one of none, mean, cls, last, rank"):
        HiddenPool("average", 8)
    with pytest.raises(InvalidArgument, match="expected 1 or more"):
        HiddenPool("mean", 0)
    assert HiddenPool("mean", 8).values().shape == (0,)
    assert HiddenPool("none", 8).values().shape == (0, 8)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen3.pooling_type", 5, "pooling_type is 5"),
        ("qwen3.attention.causal", False, "attention.causal is false"),
        ("qwen3.classifier.output_labels", ["a"], "cls.output.weight has shape"),
    ],
)
def test_metadata_of_embeddings_is_checked(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "qwen3", n_labels=2, metadata={key: value})
    with pytest.raises(ModelError, match=message):
        Model(path)


def test_a_dense_layer_of_the_head_comes_before_tanh(tmp_path: Path) -> None:
    """`cls.weight`, as encoder models have it."""
    path = write_tiny_model(tmp_path / "model.gguf", "qwen2", n_labels=2, has_dense_head=True)
    model = Model(path)
    engine = Engine(model, n_ctx=512)
    last = embedding(engine, model, [5, 6, 7], "last").astype(np.float64)
    import gguf

    tensors = {tensor.name: tensor.data.astype(np.float64) for tensor in gguf.GGUFReader(path).tensors}
    dense = np.tanh(tensors["cls.weight"] @ last + tensors["cls.bias"])
    expected = tensors["cls.output.weight"] @ dense
    np.testing.assert_allclose(embedding(engine, model, [5, 6, 7], "rank"), expected, rtol=1e-3, atol=1e-4)
    engine.close()
    model.close()
