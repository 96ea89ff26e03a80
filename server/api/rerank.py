"""Rerank: how well each document answers a query, in the shapes of Jina's API and of Hugging Face's TEI."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.embeddings import echoed_model, embedding_usage, run_embeddings
from pyllama.server.api.generate import CLIENT_CLOSED, in_thread_if_long
from pyllama.server.errors import InvalidRequest, NotSupported, ServerFault
from pyllama.server.request_fields import read_flag
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import server_state


async def rerank(http: Request) -> Response:
    """`documents` gives Jina's shape of answer, `texts` that of TEI. The score is the first output of the head."""
    state = server_state(http)
    prompt = state.loaded.rerank_prompt
    if prompt is None:
        raise NotSupported("This server does not support reranking. Start it with `--reranking`")
    body = await read_object(http)
    query = body.get("query")
    if query is None:
        raise InvalidRequest('"query" must be provided')
    if not isinstance(query, str):
        raise InvalidRequest('"query" must be a string')
    is_tei = body.get("texts") is not None
    documents = body.get("documents") if body.get("documents") is not None else body.get("texts")
    if not isinstance(documents, list) or not documents or not all(isinstance(text, str) for text in documents):
        raise InvalidRequest('"documents" must be a non-empty string array')
    n_results = _read_top_n(body.get("top_n"), len(documents))
    return_text = is_tei and read_flag(body.get("return_text"), "return_text", False)

    def read() -> list[list[int]]:
        return [prompt.tokens(query, document) for document in documents]

    texts = await in_thread_if_long(len(query) * len(documents) + sum(map(len, documents)), read)
    tasks = await run_embeddings(http, texts)
    if tasks is None:
        return Response(status_code=CLIENT_CLOSED)
    scores = [float(task.values[0]) for task in tasks]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:n_results]
    if is_tei:
        return json_response(
            [
                {"index": i, "score": scores[i], "text": documents[i]}
                if return_text
                else {"index": i, "score": scores[i]}
                for i in best
            ]
        )
    return json_response(
        {
            "model": echoed_model(body, state.settings.model_name),
            "object": "list",
            "usage": embedding_usage(tasks),
            "results": [{"index": index, "relevance_score": scores[index]} for index in best],
        }
    )


def _read_top_n(value: Any, n_documents: int) -> int:
    """As llama-server reads it: what is no number is no limit."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return n_documents
    if value < 0:
        raise ServerFault(f"Field 'top_n': must be 0 or more, but got {str(value)[:40]}")
    return int(min(value, n_documents))
