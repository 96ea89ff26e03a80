"""`Llama.embed` and `Llama.create_embedding` on the native engine with tiny models, in the ways of llama-cpp-python."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import InvalidArgument
from pyllama._engine import EmbeddingWork, Engine, HiddenPool, Model
from pyllama.llama import Llama
from pyllama.vector_norm import normalized
from support.tiny_models import write_tiny_model

TEXTS = ["the world", "a", "hello you and all the others " * 9, "is it", "it is"] * 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker whose file asks for the mean."""
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "model.gguf", "qwen3", n_labels=2, metadata={"qwen3.pooling_type": 1}
    )


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    with Llama(path, n_ctx=512, n_threads=1, embedding=True) as opened:
        yield opened


def expected(path: Path, tokens: list[int], pooling_type: str) -> np.ndarray:
    model = Model(path)
    engine = Engine(model, n_ctx=512)
    pool = HiddenPool(pooling_type, model.n_embd)
    engine.embed([EmbeddingWork(0, tokens, pool)])
    engine.close()
    model.close()
    return pool.values()


@pytest.mark.parametrize(("number", "name"), list(enumerate(["none", "mean", "cls", "last", "rank"])))
def test_pooling_types_go_by_number_and_name(path: Path, number: int, name: str) -> None:
    results = []
    for given in (number, name):
        with Llama(path, n_ctx=512, n_threads=1, embedding=True, pooling_type=given) as llm:
            assert llm.pooling_type() == number
            results.append(llm.embed(TEXTS[0]))
            tokens = llm.tokenize(TEXTS[0].encode())
    assert results[0] == results[1] == expected(path, tokens, name).tolist()


def test_one_text_gives_a_vector_and_a_list_gives_one_for_each_in_order(llm: Llama, path: Path) -> None:
    assert llm.pooling_type() == 1
    vectors, n_tokens = llm.embed(TEXTS, return_count=True)
    assert np.shape(vectors) == (len(TEXTS), llm.n_embd())
    assert isinstance(vectors[0][0], float)
    tokens = [llm.tokenize(text.encode()) for text in TEXTS]
    assert n_tokens == sum(map(len, tokens))
    for text, ids, vector in zip(TEXTS, tokens, vectors, strict=True):
        assert vector == llm.embed(text) == llm.embed([text])[0]
        assert vector == expected(path, ids, "mean").tolist()
    assert llm.embed([]) == []


def test_normalized_vectors_have_length_one(llm: Llama, path: Path) -> None:
    plain, unit = llm.embed("hello"), llm.embed("hello", normalize=True)
    assert np.linalg.norm(unit) == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(unit, np.array(plain) / np.linalg.norm(plain), rtol=1e-12)
    with Llama(path, n_ctx=512, n_threads=1, embedding=True, pooling_type="none") as tokens:
        rows = tokens.embed(TEXTS[0], normalize=True)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-12)
        assert len(rows) == len(tokens.tokenize(TEXTS[0].encode()))


def test_long_texts_are_cut_or_refused(path: Path) -> None:
    with Llama(path, n_ctx=512, n_batch=20, n_ubatch=7, n_threads=1, embedding=True) as llm:
        long = TEXTS[2]
        tokens = llm.tokenize(long.encode())
        vector, n_tokens = llm.embed(long, return_count=True)
        assert n_tokens == 20 < len(tokens)
        assert vector == expected(path, tokens[:20], "mean").tolist()
        with pytest.raises(InvalidArgument, match=f"text 1 has {len(tokens)} tokens, more than the 20"):
            llm.embed(["a", long], truncate=False)
        assert llm.embed("a", truncate=False) == llm.embed("a")


def test_create_embedding_has_the_openai_shape(llm: Llama) -> None:
    answer = llm.create_embedding(["a", "hello you"], model="mine")
    vectors, n_tokens = llm.embed(["a", "hello you"], return_count=True)
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)],
        "model": "mine",
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }
    single = llm.create_embedding("a")
    assert (single["model"], [entry["embedding"] for entry in single["data"]]) == (llm.model_path, vectors[:1])


def test_embedding_leaves_the_sequence_alone_unless_it_needs_the_memory(path: Path) -> None:
    with Llama(path, n_ctx=5632, n_batch=5632, n_threads=1, embedding=True) as llm:
        llm.eval(list(range(3, 43)))
        row = np.array(llm.scores[-1])
        llm.embed(TEXTS)
        assert llm.n_tokens == 40
        np.testing.assert_array_equal(llm.scores[-1], row)
        answer = llm.create_completion(list(range(3, 43)), max_tokens=5, temperature=0)
        llm.embed(TEXTS)
        assert llm.create_completion(list(range(3, 43)), max_tokens=5, temperature=0)["choices"] == answer["choices"]
        llm.eval([5] * 4500)
        llm.embed(["a" * 5632])
        assert llm.n_tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling_type": 5}, "pooling_type=5"),
        ({"pooling_type": "average"}, "pooling_type='average'"),
        ({"pooling_type": True}, "pooling_type=True"),
    ],
)
def test_unknown_pooling_types_are_named(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Llama(path, n_ctx=512, embedding=True, **options)


def test_models_without_a_head_cannot_rank(tiny_llama_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="classification head"):
        Llama(tiny_llama_path, n_ctx=512, embedding=True, pooling_type=4)


def test_what_cannot_be_embedded_is_told(llm: Llama, path: Path) -> None:
    with pytest.raises(InvalidArgument, match="text 1 has no tokens"):
        llm.embed(["a", ""])
    with pytest.raises(TypeError, match="int at position 0"):
        llm.embed([1])  # type: ignore[list-item]
    with Llama(path, n_ctx=512) as plain:
        for call in (plain.embed, plain.create_embedding):
            with pytest.raises(InvalidArgument, match="embedding=True"):
                call("a")
    llm.close()
    with pytest.raises(InvalidArgument, match="closed"):
        llm.embed("a")


def test_threads_queue(llm: Llama) -> None:
    expected_vectors = llm.embed(TEXTS)
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(llm.embed, TEXTS)) == expected_vectors


def test_norms() -> None:
    vector = np.array([3.0, -4.0, 0.0], np.float32)
    assert normalized(vector, -1).tolist() == [3.0, -4.0, 0.0]
    assert normalized(vector, 0).tolist() == [24570.0, -32760.0, 0.0]
    np.testing.assert_allclose(normalized(vector, 1), [3 / 7, -4 / 7, 0])
    np.testing.assert_allclose(normalized(vector), [0.6, -0.8, 0])
    np.testing.assert_allclose(normalized(vector, 3), np.array([3, -4, 0]) / 91 ** (1 / 3))
    np.testing.assert_allclose(normalized(vector * 1e30, 500), [0.75, -1, 0], rtol=1e-6)
    assert normalized(np.zeros(3)).tolist() == [0, 0, 0]
    with pytest.raises(InvalidArgument, match="-2"):
        normalized(vector, -2)
