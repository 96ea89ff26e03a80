"""Embeddings and reranking of the server as a process with tiny models: the official client, mixed load, starts."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from real_process import ServerProcess

from support.tiny_models import write_tiny_model

pytest.importorskip("pyllama._engine", reason="needs the native module")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "reranker.gguf",
        "qwen3",
        n_labels=2,
        metadata={"tokenizer.chat_template.rerank": "<|im_start|>{query}|{document}<|im_end|>"},
    )


@pytest.fixture(scope="module")
def server(reranker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("-m", str(reranker), "-c", "1024", "-np", "2", "-t", "1", "-ub", "32")
    process = ServerProcess(tmp_path_factory.mktemp("server"), *arguments, "--embeddings", "--pooling", "mean")
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()


@pytest.mark.contract("embedding 7", "embedding 11", "embedding 12")
def test_the_official_client_gets_unit_vectors_that_do_not_depend_on_company(server: ServerProcess) -> None:
    texts = ["hello world", "a", "the other " * 60, "b"]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        together = client.embeddings.create(model="any", input=texts)
        alone = [client.embeddings.create(model="any", input=text) for text in texts]
        plain = client.embeddings.create(model="any", input=texts, encoding_format="float")
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    vectors = [entry.embedding for entry in together.data]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-6)
    assert vectors == [answer.data[0].embedding for answer in alone] == [entry.embedding for entry in plain.data]


def test_embeddings_and_completions_run_together(server: ServerProcess) -> None:
    """Known fault E12: neither starves."""
    completion = {"prompt": "the world", "n_predict": 40, "temperature": 0, "cache_prompt": False}
    embedding = {"input": "hello you and the others " * 10}
    expected = server.post("/completion", completion).json()["content"], server.post("/embedding", embedding).json()
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        jobs = [
            executor.submit(server.post, *call)
            for _ in range(12)
            for call in (("/completion", completion), ("/embedding", embedding))
        ]
        answers = [job.result().json() for job in jobs]
    assert {answer["content"] for answer in answers[::2]} == {expected[0]}
    assert all(answer == expected[1] for answer in answers[1::2])
    server.wait_idle()


def test_a_rerank_server_ranks(reranker: Path, server: ServerProcess, tmp_path: Path) -> None:
    refused = server.post("/rerank", {"query": "a", "documents": ["b"]})
    assert (refused.status_code, "--reranking" in refused.text) == (501, True)
    process = ServerProcess(tmp_path, "-m", str(reranker), "-c", "512", "-np", "1", "-t", "1", "--reranking")
    try:
        process.wait_ready()
        documents = [f"document {i}" for i in range(40)]
        results = process.post("/v1/rerank", {"query": "what", "documents": documents, "top_n": 40}).json()["results"]
        scores = [result["relevance_score"] for result in results]
        assert scores == sorted(scores, reverse=True)
        assert 0 < scores[-1] < scores[0] < 1
        assert sorted(result["index"] for result in results) == list(range(40))
        labels = process.post("/embedding", {"content": "x", "embd_normalize": -1}).json()[0]["embedding"][0]
        assert sum(labels) == pytest.approx(1.0)
    finally:
        process.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reranking"], "classification head"),
        (["--reranking", "--pooling", "mean"], "--pooling mean"),
        (["--embeddings", "--embd-normalize", "-2"], "--embd-normalize"),
    ],
)
def test_a_server_that_cannot_do_what_is_asked_does_not_start(
    tiny_llama_path: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    process = ServerProcess(tmp_path, "-m", str(tiny_llama_path), "-c", "512", *arguments)
    try:
        assert process.wait_exit() == 1
        assert message in process.log
    finally:
        process.close()
