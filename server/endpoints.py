"""The one table of endpoints: what llama-server's API has and what its bodies hold. Documents and tests come from it.

Whether an endpoint is served is not said here: the route tables of the two applications say it. `absent` is the reason
for those that are in neither of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyllama.server.body_fields import (
    APPLY_TEMPLATE,
    CHAT,
    CHAT_CONTROL,
    COMPLETION,
    DETOKENIZE,
    INFILL,
    LOOKUP,
    MESSAGES,
    NATIVE_EMBEDDINGS,
    OPENAI_COMPLETION,
    OPENAI_EMBEDDINGS,
    RERANK,
    RESPONSES,
    ROUTER_MODEL,
    SLOT_FILE,
    TOKENIZE,
    BodyField,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row. `paths`: the first is the usual one. needs: the option without which there is an error, as Markdown.

    fields: of a body that is a JSON object. body: what the body is where it is no object. query: parameters of the URL
    with what they do. router: only there, and answered by the router itself. absent: why it is not served.
    status: what it answers then.
    """

    method: str
    paths: tuple[str, ...]
    purpose: str
    needs: str = ""
    fields: tuple[BodyField, ...] = ()
    body: str = ""
    query: tuple[tuple[str, str], ...] = ()
    router: bool = False
    absent: str = ""
    status: int = 404

    @property
    def routes(self) -> tuple[tuple[str, str], ...]:
        return tuple((self.method, path) for path in self.paths)


_E = Endpoint
_CONVERSATION = ("conv_id", "the conversation, as `X-Conversation-Id` of the request had it")
_PROXIED = ("url", "what to fetch")
_NO_SERVER_TOOLS = "tools that run on the server are not built"

ENDPOINTS: tuple[Endpoint, ...] = (
    _E("GET", ("/health", "/v1/health"), "whether the model is loaded"),
    _E("GET", ("/props",), "properties of the server"),
    _E("POST", ("/props",), "changes nothing", needs="`--props`", body="any object"),
    _E("GET", ("/v1/models", "/models"), "the model, or the models of a router"),
    _E("GET", ("/metrics",), "Prometheus text", needs="`--metrics`"),
    _E(
        "GET",
        ("/slots",),
        "state of every slot",
        needs="`--slots` (default)",
        query=(("fail_on_no_slot", "503 when no slot is idle"),),
    ),
    _E(
        "POST",
        ("/slots/{id_slot}",),
        "slot files",
        needs="`--slot-save-path`",
        fields=SLOT_FILE,
        query=(("action", "save, restore or erase"),),
    ),
    _E("POST", ("/completion", "/completions"), "native completion", fields=COMPLETION),
    _E("POST", ("/v1/completions",), "OpenAI completion", fields=OPENAI_COMPLETION),
    _E("POST", ("/v1/chat/completions", "/chat/completions"), "OpenAI chat", fields=CHAT),
    _E(
        "POST",
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
        "tokens of a chat's prompt",
        fields=CHAT,
    ),
    _E(
        "POST",
        ("/v1/chat/completions/control",),
        "end the thoughts of a running chat",
        fields=CHAT_CONTROL,
    ),
    _E("POST", ("/v1/responses", "/responses"), "OpenAI Responses", fields=RESPONSES),
    _E(
        "POST",
        ("/v1/responses/input_tokens", "/responses/input_tokens"),
        "tokens of a response's prompt",
        fields=RESPONSES,
    ),
    _E("POST", ("/v1/messages",), "Anthropic Messages", fields=MESSAGES),
    _E("POST", ("/v1/messages/count_tokens",), "tokens of a message's prompt", fields=MESSAGES),
    _E(
        "POST",
        ("/v1/audio/transcriptions", "/audio/transcriptions"),
        "OpenAI transcription",
        absent="audio input is not built",
        status=501,
    ),
    _E("POST", ("/infill",), "completion between a prefix and a suffix", fields=INFILL),
    _E(
        "POST",
        ("/embedding", "/embeddings"),
        "native embeddings",
        needs="`--embeddings`",
        fields=NATIVE_EMBEDDINGS,
    ),
    _E("POST", ("/v1/embeddings",), "OpenAI embeddings", needs="`--embeddings`", fields=OPENAI_EMBEDDINGS),
    _E(
        "POST",
        ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"),
        "scores of documents for a query",
        needs="`--reranking`",
        fields=RERANK,
    ),
    _E("POST", ("/v1/systemone",), "decision models", absent="no decision model can be loaded", status=501),
    _E("POST", ("/tokenize",), "text to token ids", fields=TOKENIZE),
    _E("POST", ("/detokenize",), "token ids to text", fields=DETOKENIZE),
    _E("POST", ("/apply-template",), "the prompt of a chat as text", fields=APPLY_TEMPLATE),
    _E("GET", ("/lora-adapters",), "LoRA adapters and their scales"),
    _E("POST", ("/lora-adapters",), "set their scales", body="an array of `{id, scale}`"),
    _E("GET", ("/v1/stream",), "read a kept stream again", query=(_CONVERSATION, ("from", "the first byte to send"))),
    _E("DELETE", ("/v1/stream",), "stop a kept stream", query=(_CONVERSATION,)),
    _E("POST", ("/v1/streams/lookup",), "state of kept streams", fields=LOOKUP),
    _E("GET", ("/tools",), "tools that run on the server", absent=_NO_SERVER_TOOLS, status=403),
    _E("POST", ("/tools",), "run such a tool", absent=_NO_SERVER_TOOLS, status=403),
    _E("GET", ("/sw.js",), "ends the service worker of another web interface"),
    _E("GET", ("/cors-proxy",), "fetch a URL for a web page", needs="`--ui-mcp-proxy`", query=(_PROXIED,)),
    _E("POST", ("/cors-proxy",), "the same with a body", needs="`--ui-mcp-proxy`", body="anything", query=(_PROXIED,)),
    _E("POST", ("/models",), "download a model", router=True, fields=ROUTER_MODEL),
    _E("DELETE", ("/models",), "delete a downloaded model", router=True, query=(("model", "its name"),)),
    _E("POST", ("/models/load",), "load a model", router=True, fields=ROUTER_MODEL),
    _E("POST", ("/models/unload",), "unload a model", router=True, fields=ROUTER_MODEL),
    _E("GET", ("/models/sse",), "events of the models", router=True),
)
