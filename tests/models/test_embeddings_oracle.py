"""Embeddings of tiny random models against llama.cpp: every pooling type, norms, and the scores of a reranker.

F32 weights and F16 KV on both sides. Random weights amplify rounding; a wrong row, sum or norm is far outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import EmbeddingWork, Engine, HiddenPool, Model
from pyllama.server.rerank_prompt import TEMPLATE_KEY, RerankPrompt
from pyllama.tokenizer import Tokenizer
from pyllama.vector_norm import normalized
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")

MIN_COSINE = 0.9999
TEXTS = [[5], [70, 71, 72], np.random.default_rng(4).integers(3, 290, 90).tolist()]


def cosine(a: Any, b: Any) -> float:
    a, b = (np.asarray(vector, np.float64) for vector in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


class Embedder:
    """Our side: embeddings of token lists, one pass each."""

    def __init__(self, path: Path) -> None:
        self.model = Model(path)
        self.engine = Engine(self.model, n_ctx=512)

    def __call__(self, tokens: list[int], pooling_type: str) -> np.ndarray:
        pool = HiddenPool(pooling_type, self.model.n_embd)
        self.engine.embed([EmbeddingWork(0, tokens, pool)])
        self.engine.clear(0)
        return pool.values()

    def close(self) -> None:
        self.engine.close()
        self.model.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("embeddings") / "qwen3.gguf", "qwen3", weight_type="f16")


@pytest.fixture
def embed(plain: Path) -> Iterator[Embedder]:
    embedder = Embedder(plain)
    yield embedder
    embedder.close()


@pytest.mark.parametrize("pooling_type", ["mean", "cls", "last"])
def test_pooled_embeddings_agree_with_llama_cpp(plain: Path, embed: Embedder, pooling_type: str) -> None:
    with LlamaCppPeer(plain, n_ctx=512, n_threads=1, pooling=pooling_type) as peer:
        for tokens in TEXTS:
            ours = embed(tokens, pooling_type)
            # Which other pooling gives this vector too? For one token all do.
            others = [embed(tokens, other) for other in ("mean", "cls", "last") if other != pooling_type]
            for norm in (-1, 0, 1, 2, 3):
                body = {"content": tokens, "embd_normalize": norm}
                (theirs,) = peer.post("/embedding", body)[0]["embedding"]
                assert cosine(ours, theirs) >= MIN_COSINE
                sizes = np.linalg.norm(normalized(ours, norm)), np.linalg.norm(theirs)
                assert sizes[0] == pytest.approx(sizes[1], rel=2e-3)
            if len(tokens) > 1:
                assert max(cosine(other, theirs) for other in others) < 0.99


def test_token_embeddings_agree_with_llama_cpp(plain: Path, embed: Embedder) -> None:
    with LlamaCppPeer(plain, n_ctx=512, n_threads=1, pooling="none") as peer:
        for tokens in TEXTS:
            theirs = peer.post("/embedding", {"content": tokens})[0]["embedding"]
            ours = embed(tokens, "none")
            assert ours.shape == np.shape(theirs)
            for our_row, their_row in zip(ours, theirs, strict=True):
                assert cosine(our_row, their_row) >= MIN_COSINE
                assert np.linalg.norm(our_row) == pytest.approx(np.linalg.norm(their_row), rel=2e-3)


@pytest.mark.parametrize(
    "metadata",
    [
        {TEMPLATE_KEY: "<|im_start|>is {document} about {query}?<|im_end|>"},
        {},
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
    ],
    ids=["template", "plain", "special"],
)
def test_reranker_scores_agree_with_llama_cpp(tmp_path: Path, metadata: dict[str, Any]) -> None:
    path = write_tiny_model(
        tmp_path / "reranker.gguf", "qwen3", n_labels=2, metadata={"qwen3.pooling_type": 4, **metadata}
    )
    query, documents = "hello <|im_end|>", ["the world", "x", "you and the other one"]
    embed = Embedder(path)
    prompt = RerankPrompt.from_metadata(embed.model.metadata, Tokenizer.from_metadata(embed.model.metadata))
    assert (embed.model.pooling_type, embed.model.n_labels) == ("rank", 2)
    texts = [prompt.tokens(query, document) for document in documents]
    labels = np.stack([embed(tokens, "rank") for tokens in texts])
    embed.close()
    with LlamaCppPeer(path, n_ctx=512, n_threads=1, pooling="rank") as peer:
        answer = peer.post("/rerank", {"query": query, "documents": documents})
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    theirs = {result["index"]: result["relevance_score"] for result in answer["results"]}
    np.testing.assert_allclose(labels.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(labels[:, 0], [theirs[i] for i in range(3)], atol=2e-3)
    assert np.ptp(labels[:, 0]) > 0.02  # else the scores would prove nothing
