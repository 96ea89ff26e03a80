"""The real application with a fake engine behind it, run in this process."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from fake_engine import (
    N_VOCAB,
    EmbeddingWork,
    FakeEngine,
    FakeHiddenPool,
    FakeRow,
    FakeSampler,
    FakeTemplate,
    FakeTokenizer,
    Work,
)
from starlette.testclient import TestClient

from pyllama.chat_template import ChatTemplate
from pyllama.server.app import create_app
from pyllama.server.chat_templates import ServerTemplate
from pyllama.server.embedding_tasks import EmbeddingQueue
from pyllama.server.engine_loop import EngineLoop
from pyllama.server.generation_params import GenerationParams
from pyllama.server.loaded_model import LoadedModel
from pyllama.server.loop_settings import LoopSettings
from pyllama.server.rerank_prompt import RerankPrompt
from pyllama.server.settings import ServerSettings
from pyllama.server.state import ServerState
from pyllama.server.vocabulary import Vocabulary

FACTS = {
    "vocab_type": 2,
    "n_vocab": N_VOCAB,
    "n_ctx_train": 8192,
    "n_embd": 64,
    "n_params": 1000,
    "size": 4000,
    "ftype": "F32",
}

# With calls of tools. Ends the prompt with ^, after which the fake engine says what the test wants.
CALLING_TEMPLATE = """\
{%- if tools -%}{%- for tool in tools -%}{{- tool.function | tojson ~ '\\n' -}}{%- endfor -%}{%- endif -%}
{%- for m in messages -%}
    {{- m.role ~ ': ' ~ (m.content or '') -}}
    {%- for call in m.tool_calls or [] -%}
        {{- '<tool_call>' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson ~ '</tool_call>' -}}
    {%- endfor -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant^' -}}{%- endif -%}
"""

# Leaves it to the model to begin a thinking block.
THINKING_TEMPLATE = """\
{%- for m in messages -%}
    {{- m.role ~ ': ' ~ (m.content.split('</think>')[-1] if m.content else '') ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""


class FakeServer:
    """`client`: a starlette test client. template: Jinja source instead of the fake.

    Options that are not named here are fields of `ServerSettings`.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 1024,
        n_ctx_slot: int | None = None,
        n_slots: int = 4,
        n_batch: int = 64,
        max_queue: int = 1024,
        engine: dict[str, Any] | None = None,
        tokenizer: dict[str, Any] | None = None,
        tokenizer_class: type[FakeTokenizer] = FakeTokenizer,
        defaults: dict[str, Any] | None = None,
        loads: bool = True,
        pooling: str | None = None,
        rerank_template: str | None = None,
        adds_bos: bool = False,
        template: str | None = None,
        **settings: Any,
    ) -> None:
        self.settings = ServerSettings(
            model="fake.gguf",
            aliases=("fake",),
            n_slots=n_slots,
            defaults=replace(GenerationParams(), **(defaults or {})),
            **settings,
        )
        self.state = ServerState(self.settings)
        self.template = template
        self.n_ctx_slot = n_ctx_slot or n_ctx
        self.pooling, self.rerank_template = pooling, rerank_template
        n_embedded = 3 if pooling is not None else 0
        self.engine = FakeEngine(
            n_ctx=n_ctx, n_seq_max=n_slots + n_embedded, n_batch=max(n_batch, n_slots + 1), **(engine or {})
        )
        embeddings = EmbeddingQueue(
            self.engine,
            range(n_slots, n_slots + n_embedded),
            make_work=EmbeddingWork,
            make_pool=lambda: FakeHiddenPool(pooling),
        )
        self.engine_loop = EngineLoop(
            self.engine,
            LoopSettings(
                n_slots=n_slots, n_ctx_slot=self.n_ctx_slot, n_batch=n_batch, max_queue=max_queue, adds_bos=adds_bos
            ),
            make_work=Work,
            make_row=FakeRow,
            deliver=self.state.deliver,
            embeddings=embeddings if n_embedded else None,
        )
        self.vocabulary = Vocabulary(
            tokenizer_class(**(tokenizer or {})), N_VOCAB, shows_special=self.settings.shows_special
        )
        self.app = create_app(self.state)
        self.client = TestClient(self.app)
        self.client.__enter__()
        self.engine_loop.start()
        if loads:
            self.load()

    def load(self) -> None:
        self.state.set_loaded(
            LoadedModel(
                facts=FACTS,
                vocabulary=self.vocabulary,
                engine_loop=self.engine_loop,
                sampler_factory=FakeSampler,
                defaults=self.settings.defaults,
                n_ctx=self.engine.n_ctx,
                n_ctx_slot=self.n_ctx_slot,
                chat_template=FakeTemplate()
                if self.template is None
                else ServerTemplate(ChatTemplate(self.template), self.vocabulary.tokenizer),
                can_shift=not self.engine.is_recurrent,
                shifts_context=self.settings.context_shift,
                pooling=self.pooling,
                rerank_prompt=RerankPrompt(self.vocabulary.tokenizer, self.rerank_template)
                if self.pooling == "rank"
                else None,
            )
        )

    def close(self) -> None:
        self.engine_loop.stop(5)
        self.client.__exit__(None, None, None)

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> Any:
        return self.client.get(path, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Data of all events of a stream; `[DONE]` stays text."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        return parse_events(response.text)

    def wait_idle(self, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while self.engine_loop.n_busy or self.engine_loop.n_deferred:
            assert time.monotonic() < deadline, "slots are still busy"
            time.sleep(0.005)


def parse_events(text: str) -> list[Any]:
    """SSE text -> values of its data lines. Every event must end with a blank line."""
    assert text.endswith("\n\n")
    values: list[Any] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        assert "\n" not in data
        values.append(data if data == "[DONE]" else json.loads(data))
    return values


def parse_named_events(text: str) -> list[tuple[str, Any]]:
    """SSE text -> (name, value) of its events; the name of an event without one is empty."""
    assert text.endswith("\n\n")
    events: list[tuple[str, Any]] = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        lines = block.split("\n")
        name = lines.pop(0).removeprefix("event: ") if block.startswith("event: ") else ""
        assert len(lines) == 1
        assert lines[0].startswith("data: "), block
        events.append((name, json.loads(lines[0].removeprefix("data: "))))
    return events
