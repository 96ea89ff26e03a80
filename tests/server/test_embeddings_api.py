"""The embedding and rerank routes over the fake engine: shapes of input and output, refusals, usage, order, limits."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import BOS, END, fake_embedding

Serve = Callable[..., Any]
LONG = "x" * 1500


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


INPUTS: list[tuple[Any, list[list[int]]]] = [
    ("hello", [tokens_of("hello")]),
    (["a", "bb", "a"], [[97], [98, 98], [97]]),
    ([1, 2, 3], [[1, 2, 3]]),
    ([1, "ab", 2], [[1, 97, 98, 2]]),
    ([[1, 2], [3]], [[1, 2], [3]]),
    ([["a", 1], "b", [2]], [[97, 1], [98], [2]]),
    ({"prompt_string": "ab"}, [[97, 98]]),
    ([{"prompt_string": "ab"}, "c"], [[97, 98], [99]]),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [[97, 98]]),
    (["c", {"content": [{"type": "text", "text": "a"}]}], [[99], [97]]),
    ("a</s>", [[97, END]]),
]


@pytest.mark.contract("embedding 2", "embedding 4", "embedding 5", "embedding 8", "embedding 15")
@pytest.mark.parametrize(("value", "texts"), INPUTS)
def test_every_shape_of_input_gives_one_vector_per_text_in_order(
    serve: Serve, value: Any, texts: list[list[int]]
) -> None:
    server = serve(pooling="mean")
    answer = server.post("/v1/embeddings", {"input": value, "model": "mine"}).json()
    assert list(answer) == ["model", "object", "usage", "data"]
    assert (answer["model"], answer["object"]) == ("mine", "list")
    n_tokens = sum(map(len, texts))
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert [entry["index"] for entry in answer["data"]] == list(range(len(texts)))
    for entry, tokens in zip(answer["data"], texts, strict=True):
        assert list(entry) == ["embedding", "index", "object"]
        np.testing.assert_allclose(entry["embedding"], unit(fake_embedding(tokens)), rtol=1e-6)
    native = server.post("/embeddings", {"input": value}).json()
    assert [list(entry) for entry in native] == [["index", "embedding"]] * len(texts)
    assert [entry["embedding"] for entry in native] == [[entry["embedding"]] for entry in answer["data"]]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_dimensions_keep_the_first_values_and_normalise_them_again(serve: Serve, path: str) -> None:
    server = serve(pooling="mean")
    answer = server.post(path, {"input": "ab", "dimensions": 2}).json()
    vector = answer["data"][0]["embedding"] if path == "/v1/embeddings" else answer[0]["embedding"][0]
    np.testing.assert_allclose(vector, unit(fake_embedding([97, 98])[:2]), rtol=1e-6)


@pytest.mark.parametrize("dimensions", [0, -1, 65, 10**400, 1.5, True, "2", [2]])
def test_dimensions_that_the_model_lacks_are_refused(serve: Serve, dimensions: Any) -> None:
    response = serve(pooling="mean").post("/v1/embeddings", {"input": "a", "dimensions": dimensions})
    assert response.status_code == 400
    assert "dimensions" in response.json()["error"]["message"]


def test_bos_is_added_to_texts_where_the_vocabulary_wants_it(serve: Serve) -> None:
    server = serve(pooling="last", tokenizer={"add_bos": True})
    (entry,) = server.post("/embedding", {"content": "a", "embd_normalize": -1}).json()
    np.testing.assert_array_equal(np.float32(entry["embedding"][0]), fake_embedding([BOS, 97]))


@pytest.mark.contract("embedding 6", "embedding 17")
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, '"input" or "content" must be provided'),
        ({"input": None}, 400, '"input" or "content" must be provided'),
        ({"input": []}, 400, '"input" must not be empty'),
        ({"input": ""}, 400, "Input content cannot be empty"),
        ({"input": ["a", ""]}, 400, "Input content cannot be empty"),
        ({"input": True}, 400, "must be a string"),
        ({"input": [[True]]}, 400, "boolean"),
        ({"input": [999]}, 400, "outside the vocabulary"),
        ({"input": {"content": "a"}}, 400, "array of parts"),
        ({"input": {"content": [{"type": "audio"}]}}, 400, "a part of"),
        ({"input": {"content": [{"type": "text", "text": 1}]}}, 400, "a part of"),
        ({"input": {"content": [{"type": "image_url", "image_url": {}}]}}, 500, "image input is not supported"),
        ({"input": "a", "encoding_format": 1}, 400, "type must be string"),
        ({"input": "a", "encoding_format": "hex"}, 400, "either float or base64"),
        ({"input": "a", "embd_normalize": "x"}, 400, "type must be number"),
        ({"input": "a", "embd_normalize": -2}, 400, "between -1"),
    ],
)
def test_bad_requests_are_refused_by_name(serve: Serve, body: Any, status: int, message: str) -> None:
    server = serve(pooling="mean")
    response = server.post("/v1/embeddings", body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert server.post("/v1/embeddings", {"input": "a"}).status_code == 200


@pytest.mark.contract("embedding 13")
def test_input_longer_than_the_batch_works_and_longer_than_the_slot_is_refused(serve: Serve) -> None:
    """Known fault E31: the size of a pass is no limit."""
    server = serve(pooling="mean", n_batch=7, n_ctx_slot=500)
    (entry,) = server.post("/embedding", {"content": LONG[:500]}).json()
    np.testing.assert_allclose(entry["embedding"][0], unit(fake_embedding(tokens_of(LONG[:500]))), rtol=1e-6)
    assert max(server.engine.embedded_rows) <= 7
    error = server.post("/embedding", {"content": ["a", LONG[:501]]}).json()["error"]
    assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (501, 500)
    assert "too large" in error["message"]


@pytest.mark.contract("own 27")
@pytest.mark.parametrize(
    ("norm", "size"),
    [
        (-1, lambda v: v),
        (0, lambda v: v / np.abs(v).max() * 32760),
        (1, lambda v: v / np.abs(v).sum()),
        (2, unit),
        (3, lambda v: v / (np.abs(v) ** 3).sum() ** (1 / 3)),
        (1000, lambda v: v / np.abs(v).max()),
    ],
)
def test_the_norm_is_the_request_s_or_the_server_s(serve: Serve, norm: int, size: Callable[[Any], Any]) -> None:
    expected = size(fake_embedding([97]).astype(np.float64))
    by_request, by_option = serve(pooling="mean"), serve(pooling="mean", embd_normalize=norm)
    for server, fields in ((by_request, {"embd_normalize": norm}), (by_option, {})):
        answer = server.post("/v1/embeddings", {"input": "a", **fields}).json()
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected, rtol=1e-3 if norm == 1000 else 1e-6)


@pytest.mark.contract("embedding 16")
def test_base64_holds_the_same_numbers(serve: Serve) -> None:
    server = serve(pooling="cls")
    plain = server.post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}).json()["data"]
    coded = server.post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}).json()["data"]
    for a, b in zip(plain, coded, strict=True):
        assert list(b) == ["embedding", "index", "object", "encoding_format"]
        assert np.frombuffer(base64.b64decode(b["embedding"]), "<f4").tolist() == a["embedding"]


@pytest.mark.contract("embedding 9", "embedding 10")
def test_without_pooling_there_is_a_vector_per_token_on_the_native_route_only(serve: Serve) -> None:
    server = serve(pooling="none")
    (entry,) = server.post("/embeddings", {"input": "abc"}).json()
    expected = [fake_embedding(tokens_of("abc")[: i + 1]).tolist() for i in range(3)]
    assert entry == {"index": 0, "embedding": expected}
    error = server.post("/v1/embeddings", {"input": "abc"}).json()["error"]
    assert (error["code"], "Pooling type 'none' is not OAI compatible" in error["message"]) == (400, True)


def test_content_on_the_openai_route_gives_the_native_shape_and_input_wins(serve: Serve) -> None:
    server = serve(pooling="mean")
    native = server.post("/embedding", {"content": "a"}).json()
    assert server.post("/v1/embeddings", {"content": "a"}).json() == native
    assert server.post("/embeddings", {"content": "b", "input": "a"}).json() == native
    both = server.post("/v1/embeddings", {"content": "b", "input": "a"}).json()
    assert [both["data"][0]["embedding"]] == native[0]["embedding"]
    assert both["model"] == "fake"


@pytest.mark.parametrize("path", ["/embedding", "/embeddings", "/v1/embeddings"])
def test_embeddings_need_the_option(serve: Serve, path: str) -> None:
    error = serve().post(path, {"input": "a"}).json()["error"]
    assert (error["code"], error["type"]) == (501, "not_supported_error")
    assert "--embeddings" in error["message"]


def test_a_failure_of_the_engine_is_told_and_the_next_request_works(serve: Serve) -> None:
    from pyllama.errors import DeviceError

    server = serve(pooling="mean")
    server.engine.fails = DeviceError("the device is gone")
    response = server.post("/v1/embeddings", {"input": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "the device is gone")
    server.wait_idle()
    assert server.post("/v1/embeddings", {"input": ["a", "b"]}).status_code == 200
    assert len(server.engine.pool.free) == 4


@pytest.mark.contract("metrics 9")
def test_metrics_count_embedded_tokens_as_prompt_tokens(serve: Serve) -> None:
    server = serve(pooling="mean", has_metrics=True)
    server.post("/v1/embeddings", {"input": ["abc", "de"]})
    values = dict(line.split() for line in server.get("/metrics").text.splitlines() if not line.startswith("#"))
    assert float(values["llamacpp:prompt_tokens_total"]) == 5
    assert float(values["llamacpp:tokens_predicted_total"]) == 0
    assert float(values["llamacpp:n_decode_total"]) >= 1
    assert float(values["llamacpp:n_tokens_max"]) == 3


# ---- rerank

TEMPLATE = "q={query} d={document}</s>"


def score(query: str, document: str) -> float:
    return float(fake_embedding([*tokens_of(f"q={query} d={document}"), END], 2)[0])


@pytest.fixture
def ranker(serve: Serve) -> Any:
    return serve(pooling="rank", rerank_template=TEMPLATE)


@pytest.mark.contract("rerank 2", "rerank 4")
@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_documents_come_back_by_falling_score(ranker: Any, path: str) -> None:
    documents = ["one", "two", "", "four", "two"]
    answer = ranker.post(path, {"query": "{document}", "documents": documents, "model": "m"}).json()
    assert list(answer) == ["model", "object", "usage", "results"]
    scores = [score("{document}", document) for document in documents]
    order = sorted(range(5), key=lambda i: -scores[i])
    assert answer["results"] == [{"index": i, "relevance_score": scores[i]} for i in order]
    n_tokens = sum(len("q={document} d=") + len(document) + 1 for document in documents)
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    texts = ranker.post(path, {"query": "{document}", "texts": documents}).json()
    assert texts == [{"index": i, "score": scores[i]} for i in order]
    shown = ranker.post(path, {"query": "{document}", "texts": documents, "return_text": True}).json()
    assert shown == [{"index": i, "score": scores[i], "text": documents[i]} for i in order]


@pytest.mark.contract("rerank 5")
@pytest.mark.parametrize(("top_n", "n_results"), [(0, 0), (1, 1), (2, 2), (99, 3), (1.9, 1), ("x", 3), (None, 3)])
def test_top_n_cuts_the_results(ranker: Any, top_n: Any, n_results: int) -> None:
    body = {"query": "q", "documents": ["a", "b", "c"], "top_n": top_n}
    results = ranker.post("/rerank", body).json()["results"]
    assert len(results) == n_results
    assert results == ranker.post("/rerank", {**body, "top_n": 3}).json()["results"][:n_results]


@pytest.mark.contract("rerank 3")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"documents": ["a"]}, 400),
        ({"query": 1, "documents": ["a"]}, 400),
        ({"query": "q"}, 400),
        ({"query": "q", "documents": []}, 400),
        ({"query": "q", "documents": None}, 400),
        ({"query": "q", "documents": "a"}, 400),
        ({"query": "q", "documents": 123}, 400),
        ({"query": "q", "documents": [1, 2, 3]}, 400),
        ({"query": "q", "documents": ["a", 1]}, 400),
        ({"query": "q", "texts": ["a", None]}, 400),
        ({"query": "q", "texts": ["a"], "return_text": 1}, 400),
        ({"query": "q", "documents": ["a", LONG]}, 400),
        ({"query": "q", "documents": ["a"], "top_n": -1}, 500),
    ],
)
def test_bad_rerank_requests_are_refused(ranker: Any, body: Any, status: int) -> None:
    response = ranker.post("/rerank", body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


def test_reranking_needs_rank_pooling(serve: Serve) -> None:
    for server in (serve(), serve(pooling="mean")):
        error = server.post("/rerank", {"query": "a", "documents": ["b"]}).json()["error"]
        assert (error["code"], "--reranking" in error["message"]) == (501, True)


def test_without_a_template_special_tokens_stand_between(serve: Serve) -> None:
    server = serve(pooling="rank", tokenizer={"add_bos": True})
    (result,) = server.post("/rerank", {"query": "a</s>", "texts": ["b"]}).json()
    assert math.isclose(result["score"], fake_embedding([BOS, *tokens_of("a</s>b")], 2)[0], rel_tol=1e-6)
