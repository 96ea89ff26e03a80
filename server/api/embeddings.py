"""Embeddings: `/v1/embeddings` as OpenAI has it, `/embedding` and `/embeddings` in llama-server's own shape."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyllama.server.api.generate import CLIENT_CLOSED, close_on_disconnect, in_thread_if_long
from pyllama.server.embedding_tasks import EmbeddingRequest, EmbeddingTask
from pyllama.server.errors import InputTooLarge, InvalidRequest, NotSupported, ServerFault
from pyllama.server.generation import Failed, Finished
from pyllama.server.json_codec import type_name
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.prompts import read_prompts
from pyllama.server.request_fields import out_of_range, present, wrong_type
from pyllama.server.responses import json_response, read_object
from pyllama.server.state import server_state

NORMS = range(-1, 1001)


async def native_embeddings(http: Request) -> Response:
    return await _embed(http, is_openai=False)


async def openai_embeddings(http: Request) -> Response:
    return await _embed(http, is_openai=True)


async def run_embeddings(http: Request, texts: list[list[int]]) -> list[EmbeddingTask] | None:
    """The finished tasks, in the order of the texts; None when the client left. Raises the first failure."""
    loaded = server_state(http).loaded
    for tokens in texts:
        if not tokens:
            raise InvalidRequest("Input content cannot be empty")
        if len(tokens) > loaded.n_ctx_slot:
            raise InputTooLarge(len(tokens), loaded.n_ctx_slot)
    request = EmbeddingRequest(texts, loaded.adapters.scales_of(None))
    loaded.engine_loop.submit(request)
    watcher = asyncio.create_task(close_on_disconnect(http, request))
    n_left = len(request.tasks)
    try:
        while n_left:
            for event in await request.mailbox.get():
                if isinstance(event, Failed):
                    raise event.error
                n_left -= isinstance(event, Finished)
            if request.mailbox.is_closed:
                return None
        return request.tasks
    finally:
        watcher.cancel()
        if n_left:
            loaded.engine_loop.cancel(request)


async def _embed(http: Request, *, is_openai: bool) -> Response:
    state = server_state(http)
    loaded = state.loaded
    if loaded.pooling is None:
        raise NotSupported("This server does not support embeddings. Start it with `--embeddings`")
    body = await read_object(http)
    if is_openai and loaded.pooling == "none":
        raise InvalidRequest("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    value = body.get("input")
    if value is None:
        value = body.get("content")
        is_openai = False
    if value is None:
        raise InvalidRequest('"input" or "content" must be provided')
    is_base64 = _reads_base64(body)
    norm = _read_norm(body, state.settings.embd_normalize)
    n_values = _read_dimensions(body, loaded.facts["n_embd"])
    texts = await in_thread_if_long(len(await http.body()), read_texts, value, loaded)
    tasks = await run_embeddings(http, texts)
    if tasks is None:
        return Response(status_code=CLIENT_CLOSED)
    vectors = [_scaled(task.values[..., :n_values], loaded.pooling, norm) for task in tasks]
    if not is_openai:
        return json_response(
            [
                {"index": index, "embedding": vector.tolist() if vector.ndim == 2 else [vector.tolist()]}
                for index, vector in enumerate(vectors)
            ]
        )
    data = [_openai_entry(index, vector, is_base64) for index, vector in enumerate(vectors)]
    return json_response(
        {
            "model": echoed_model(body, state.settings.model_name),
            "object": "list",
            "usage": embedding_usage(tasks),
            "data": data,
        }
    )


def echoed_model(body: dict[str, Any], model_name: str) -> str:
    """What the request called the model, else the server's name for it."""
    model = body.get("model")
    return model if isinstance(model, str) else model_name


def embedding_usage(tasks: Sequence[EmbeddingTask]) -> dict[str, int]:
    n_tokens = sum(len(task.tokens) for task in tasks)
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def read_texts(value: Any, loaded: LoadedModel) -> list[list[int]]:
    """The shapes of a prompt, and objects with OpenAI's content parts. Raises `InvalidRequest`."""
    if value == []:
        raise InvalidRequest('"input" must not be empty')
    value = [_joined_parts(item) for item in value] if isinstance(value, list) else _joined_parts(value)
    return read_prompts(value, loaded.tokenizer, loaded.vocabulary.n_vocab)


def _joined_parts(value: Any) -> Any:
    """`{"content": [parts]}` as the text of its parts; anything else as it is."""
    if not isinstance(value, dict) or "content" not in value:
        return value
    parts = value["content"]
    if not isinstance(parts, list) or not parts:
        raise InvalidRequest(
            f'"input": "content" must be an array of parts that is not empty, but is {type_name(parts)}'
        )
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "input_video", "video_url"):
            medium = kind.replace("input_", "").replace("_url", "")
            raise ServerFault(
                f"{medium} input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest('"input": a part of "content" must be {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "".join(texts)


def _reads_base64(body: dict[str, Any]) -> bool:
    value = body.get("encoding_format")
    if value is None:
        return False
    if not isinstance(value, str):
        raise wrong_type("encoding_format", "string", value)
    if value not in ("float", "base64"):
        raise InvalidRequest("The format to return the embeddings in. Can be either float or base64")
    return value == "base64"


def _read_norm(body: dict[str, Any], default: int) -> int:
    found = present(body, ("embd_normalize",))
    if found is None:
        return default
    _, value = found
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type("embd_normalize", "number", value)
    if int(value) not in NORMS:
        raise InvalidRequest(f"Field 'embd_normalize': must be between {NORMS[0]} and {NORMS[-1]}")
    return int(value)


def _read_dimensions(body: dict[str, Any], n_embd: int) -> int | None:
    """How many values of each vector are wanted, for models whose first values are an embedding; None: all."""
    value = body.get("dimensions")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type("dimensions", "integer", value)
    if not 1 <= value <= n_embd:
        raise out_of_range("dimensions", 1, n_embd, value)
    return value


def _scaled(values: Any, pooling: str, norm: int) -> Any:
    from pyllama.vector_norm import normalized  # NumPy is not needed to listen

    return values if pooling == "none" else normalized(values, norm).astype("f4")


def _openai_entry(index: int, vector: Any, is_base64: bool) -> dict[str, Any]:
    if not is_base64:
        return {"embedding": vector.tolist(), "index": index, "object": "embedding"}
    text = base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return {"embedding": text, "index": index, "object": "embedding", "encoding_format": "base64"}
