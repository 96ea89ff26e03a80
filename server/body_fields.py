"""What the bodies of requests may hold, by endpoint, beyond the fields that every generation has (`request_fields`).

The handlers read and check these fields; a test compares what they look up with these rows. `no_effect` and `refused`
say why, where a field does nothing or may only have its neutral value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyllama.server.request_fields import INT_MAX, REASONING_FORMATS, REQUEST_FIELDS, UNSUPPORTED_FIELDS, RequestField

Schema = Mapping[str, Any]

BOOL: Schema = {"type": "boolean"}
INT: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"type": "array", "items": TEXT}
OBJECTS: Schema = {"type": "array", "items": OBJECT}
TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXT_OR_TEXTS: Schema = {"anyOf": [TEXT, TEXTS]}


@dataclass(frozen=True, slots=True)
class BodyField:
    """One row. schema: JSON schema of values that are taken, `null` aside, which is as good as absent."""

    name: str
    schema: Schema
    help: str
    aliases: tuple[str, ...] = ()
    required: bool = False
    no_effect: str = ""
    refused: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


_B = BodyField


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _objects(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "array", "items": {"type": "object", "required": list(required), "properties": properties}}


# ---- generation


def _schema_of(field: RequestField) -> Schema:
    if field.kind in ("int", "uint32", "float"):
        schema: dict[str, Any] = {"type": "number" if field.kind == "float" else "integer"}
        if not field.soft:
            if field.low is not None:
                schema["minimum"] = field.low
            if field.high is not None or field.kind == "int":
                schema["maximum"] = INT_MAX if field.high is None else field.high
        return schema
    return {"bool": BOOL, "text": TEXT, "schema": OBJECT, "strings": TEXTS, "text_or_list": TEXT_OR_TEXTS}[field.kind]


_NO_EFFECT = {"backend_sampling": "samplers run on the CPU, with the same results"}

_GENERATION = tuple(
    _B(f.name, _schema_of(f), f.help, f.aliases, no_effect=_NO_EFFECT.get(f.name, "")) for f in REQUEST_FIELDS
)

# Not in the table of generation fields, because their values are of a shape of their own or do nothing yet.
_MORE = (
    _B("samplers", TEXT_OR_TEXTS, "the chain of samplers: names, or a string of letters"),
    _B(
        "logit_bias",
        {"anyOf": [{"type": "array", "items": {"type": "array"}}, OBJECT]},
        "pairs or an object of token (id or text) and bias; `false` bans",
    ),
    _B("stream_options", OBJECT, "`include_usage`: a last chunk with the usage (chats)"),
    _B("reasoning_format", _one_of("none", "auto"), "thoughts stay in the content"),
    _B("grammar_triggers", OBJECTS, "what such a grammar begins at"),
    _B("preserved_tokens", {"type": "array"}, "control tokens that are shown as text"),
    _B("lora", _objects(("id",), id=INT, scale={"type": "number"}), "scales of adapters; those not listed get 0"),
    _B("chat_format", {"type": ["integer", "string"]}, "how the answer is read"),
    _B("chat_parser", TEXT, "how the answer is read"),
    _B("generation_prompt", TEXT, "the beginning of the answer in the prompt; a thinking block may be open in it"),
    _B("parse_tool_calls", BOOL, "tell calls apart from the content"),
    _B("echo", BOOL, "the given text is part of the answer"),
    _B("reasoning_budget_start_tag", TEXT, "what opens thoughts"),
    _B("reasoning_budget_end_tags", TEXTS, "what closes thoughts", aliases=("reasoning_budget_end_tag",)),
)


def _as_read(field: BodyField) -> BodyField:
    if all(name in UNSUPPORTED_FIELDS for name in field.names):
        return replace(field, refused="not built yet")
    return field


_known = {name for field in _GENERATION for name in field.names}
GENERATION: tuple[BodyField, ...] = _GENERATION + tuple(_as_read(f) for f in _MORE if f.name not in _known)

MODEL = _B("model", TEXT, "the model, where the server is a router; else without effect")
SPECULATIVE = _B("speculative", OBJECT, "drafting", no_effect="drafting is set when the server starts")
NOTED = "kept by OpenAI for accounting; nothing is stored here"


def _rows(*groups: Iterable[BodyField]) -> tuple[BodyField, ...]:
    """The rows of all groups; a later row of a name takes the place of the earlier one, or of its alias."""
    rows: dict[str, BodyField] = {}
    for group in groups:
        for field in group:
            for name, row in rows.items():
                if not set(row.aliases).isdisjoint(field.names) and name != field.name:
                    rows[name] = replace(row, aliases=tuple(a for a in row.aliases if a not in field.names))
            rows[field.name] = field
    return tuple(rows.values())


PROMPT = _B(
    "prompt",
    {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": [{"type": "integer", "minimum": 0}, TEXT, TOKENS]}}, OBJECT]},
    'text, token ids, both mixed, `{"prompt_string": ...}`, or a list of these',
    required=True,
)
COMPLETION = _rows((PROMPT, MODEL), GENERATION, (SPECULATIVE,))
OPENAI_COMPLETION = _rows(
    (PROMPT, MODEL),
    GENERATION,
    (
        _B("echo", BOOL, "the prompt is part of the text; with `logprobs` so are its log-probabilities"),
        _B("best_of", INT, "choices to choose from", refused="all choices are answered; use `n`"),
        _B("suffix", TEXT, "what comes after the text", refused="`/infill` has it"),
        _B("user", TEXT, "who asks", no_effect=NOTED),
    ),
)
INFILL = _rows(
    (
        _B("input_prefix", TEXT, "what stands before the gap", required=True),
        _B("input_suffix", TEXT, "what stands after it", required=True),
        _B("prompt", TEXT, "what was typed after the prefix"),
        _B("input_extra", _objects(("text",), text=TEXT, filename=TEXT), "other files"),
        MODEL,
    ),
    GENERATION,
    (SPECULATIVE,),
)

# ---- chats

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": _one_of("text"), "text": TEXT},
}
_CALL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "id": TEXT,
        "type": _one_of("function"),
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": TEXT, "arguments": TEXT},
        },
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": _one_of("system", "developer", "user", "assistant", "tool"),
        "content": {"anyOf": [TEXT, {"type": "array", "items": _PART}]},
        "reasoning_content": TEXT,
        "name": TEXT,
        "tool_call_id": TEXT,
        "tool_calls": {"type": "array", "items": _CALL},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": _one_of("function"),
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}, "description": TEXT, "parameters": OBJECT},
        },
    },
}
_RESPONSE_FORMAT: Schema = {
    "type": "object",
    "properties": {
        "type": _one_of("text", "json_object", "json_schema"),
        "schema": OBJECT,
        "json_schema": {"type": "object", "properties": {"name": TEXT, "schema": OBJECT}},
    },
}

_PROMPT_OF_CHAT = (
    _B("messages", {"type": "array", "items": _MESSAGE}, "the conversation; parts may be texts", required=True),
    _B("tools", {"type": "array", "items": _TOOL}, "functions that the model may call"),
    _B("tool_choice", {"anyOf": [_one_of("auto", "none", "required"), OBJECT]}, "whether, or which, it must call"),
    _B("parallel_tool_calls", BOOL, "false: at most one call"),
    _B("parse_tool_calls", BOOL, "false: calls stay in the content"),
    _B("response_format", _RESPONSE_FORMAT, "the form of the answer: text, JSON, a JSON schema"),
    _B("json_schema", OBJECT, "a schema of the answer"),
    _B("grammar", TEXT, "GBNF grammar that the answer keeps to; empty: none"),
    _B("chat_template_kwargs", OBJECT, "variables of the template"),
    _B("reasoning_effort", TEXT, "`none`: no thoughts; else a variable of the template"),
    _B("reasoning_format", _one_of(*REASONING_FORMATS), "where thoughts are shown"),
    _B("add_generation_prompt", BOOL, "end the prompt with the beginning of an answer"),
    _B("continue_final_message", {"anyOf": [BOOL, TEXT]}, "go on with the last message of the assistant"),
    _B("echo", BOOL, "the text that is continued is part of the answer"),
    MODEL,
)
_OPENAI_NOTES = (
    _B("user", TEXT, "who asks", no_effect=NOTED),
    _B("store", BOOL, "keep the answer", no_effect="nothing is stored"),
    _B("metadata", OBJECT, "notes of the client", no_effect=NOTED),
    _B("service_tier", TEXT, "how soon", no_effect="there is one queue"),
)
CHAT = _rows(
    _PROMPT_OF_CHAT[:1],
    GENERATION,
    _PROMPT_OF_CHAT,
    (
        _B("logprobs", BOOL, "log-probabilities of the tokens"),
        _B("top_logprobs", {"type": "integer", "minimum": 0, "maximum": INT_MAX}, "of so many alternatives"),
        SPECULATIVE,
        *_OPENAI_NOTES,
    ),
)
APPLY_TEMPLATE = (*_PROMPT_OF_CHAT, *(field for field in GENERATION if field.name == "grammar_lazy"))
CHAT_CONTROL = (
    _B("id", {"type": "string", "minLength": 1}, "of the chat that is being answered", required=True),
    _B("action", _one_of("reasoning_end"), "what shall happen", required=True),
    MODEL,
)

_RESPONSE_ITEM: Schema = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": _one_of("user", "system", "developer", "assistant"), "content": TEXT},
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {"type": _one_of("function_call"), "call_id": TEXT, "name": TEXT, "arguments": TEXT},
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {"type": _one_of("function_call_output"), "call_id": TEXT, "output": TEXT},
        },
    ]
}
_NOT_STORED = "this server stores no responses"
RESPONSES = _rows(
    (
        _B("input", {"anyOf": [TEXT, {"type": "array", "items": _RESPONSE_ITEM}]}, "a text, or items", required=True),
        _B("instructions", TEXT, "a system message before it"),
        _B("max_output_tokens", {"type": "integer", "minimum": -1, "maximum": INT_MAX}, "token budget"),
        _B("reasoning", OBJECT, "`effort`: as reasoning_effort in chats"),
        _B("text", OBJECT, "`format`: the form of the answer, as response_format in chats"),
        _B("tools", _objects(("type", "name"), type=_one_of("function"), name=TEXT, parameters=OBJECT), "functions"),
        _B("include", TEXTS, "`message.output_text.logprobs`: log-probabilities; the rest has no effect"),
    ),
    [field for field in _rows(GENERATION, _PROMPT_OF_CHAT[2:]) if field.name != "n_cmpl"],
    (
        _B("n_cmpl", {"const": 1}, "a response has one choice", ("n",), refused="a response has one choice"),
        _B("logprobs", BOOL, "log-probabilities of the message's tokens"),
        _B("top_logprobs", {"type": "integer", "minimum": 0, "maximum": INT_MAX}, "them and of so many alternatives"),
        _B("previous_response_id", TEXT, "go on from a stored response", refused=_NOT_STORED),
        _B("conversation", {}, "a stored conversation", refused=_NOT_STORED),
        _B("prompt", {}, "a stored prompt", refused=_NOT_STORED),
        _B("messages", {"type": "array"}, "a chat", no_effect="`input` takes its place"),
        _B("background", BOOL, "fetch the answer later", refused=_NOT_STORED),
        _B("truncation", TEXT, "drop what does not fit", no_effect="as in llama-server: too long a prompt is refused"),
        *_OPENAI_NOTES,
    ),
)

# ---- Anthropic

_BLOCKS: Schema = {"anyOf": [TEXT, {"type": "array", "items": _PART}]}
MESSAGES = (
    _B(
        "messages",
        _objects(("role", "content"), role=_one_of("user", "assistant"), content=_BLOCKS),
        "turns of texts or blocks (`text`, `thinking`, `tool_use`, `tool_result`)",
        required=True,
    ),
    _B("system", _BLOCKS, "the system message"),
    _B("max_tokens", {"type": "integer", "minimum": -1, "maximum": INT_MAX}, "token budget; 4096 by default"),
    _B("stop_sequences", TEXTS, "texts that end the generation"),
    _B("tools", _objects(("name",), name={"type": "string", "minLength": 1}, input_schema=OBJECT), "functions"),
    _B("tool_choice", OBJECT, "`type`: whether it must call, `name`: which; `disable_parallel_tool_use`"),
    _B("temperature", {"type": "number"}, "0: greedy"),
    _B("top_p", {"type": "number"}, "1: off"),
    _B("top_k", INT, "0: off"),
    _B("stream", BOOL, "answer with server-sent events"),
    _B("chat_template_kwargs", OBJECT, "variables of the template"),
    _B("thinking", OBJECT, "`budget_tokens`: tokens of thoughts"),
    _B("output_config", OBJECT, "`format`: a JSON schema of the answer; `effort`: as reasoning_effort in chats"),
    _B("cache_control", OBJECT, "what to keep", no_effect="the longest known beginning is always reused"),
    _B("metadata", OBJECT, "notes of the client", no_effect="nothing is stored"),
    _B("service_tier", TEXT, "how soon", no_effect="there is one queue"),
    MODEL,
)

# ---- the rest

_TEXTS_TO_EMBED: Schema = {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}}, TOKENS, OBJECT]}
_EMBEDDINGS = (
    _B("embd_normalize", {"type": "integer", "minimum": -1, "maximum": 1000}, "-1: not, 0: largest, p: p-norm"),
    _B("encoding_format", _one_of("float", "base64"), "how vectors are written"),
    _B("dimensions", {"type": "integer", "minimum": 1}, "the first so many values of each vector, normalised again"),
    _B("user", TEXT, "who asks", no_effect=NOTED),
    _B("model", TEXT, "the model, where the server is a router; repeated in the answer"),
)
NATIVE_EMBEDDINGS = (
    _B("content", _TEXTS_TO_EMBED, "a text, token ids, `{content: [parts]}`, or a list of these", required=True),
    _B("input", _TEXTS_TO_EMBED, "the same, and it wins"),
    *_EMBEDDINGS,
)
OPENAI_EMBEDDINGS = (
    _B("input", _TEXTS_TO_EMBED, "a text, token ids, `{content: [parts]}`, or a list of these", required=True),
    _B("content", _TEXTS_TO_EMBED, "instead of `input`: the answer has the native shape"),
    *_EMBEDDINGS,
)
RERANK = (
    _B("query", TEXT, "the query", required=True),
    _B("documents", {**TEXTS, "minItems": 1}, "texts to score; answer in Jina's shape", required=True),
    _B("texts", {**TEXTS, "minItems": 1}, "instead of `documents`: answer in TEI's shape"),
    _B("top_n", {"type": "integer", "minimum": 0}, "so many of the best"),
    _B("return_text", BOOL, "with `texts`: repeat them"),
    _B("model", TEXT, "the model, where the server is a router; repeated in the answer"),
)
TOKENIZE = (
    _B("content", {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": [TEXT, INT]}}]}, "text, or text and token ids"),
    _B("add_special", BOOL, "add what the vocabulary begins texts with"),
    _B("parse_special", BOOL, "false: names of control tokens are plain text"),
    _B("with_pieces", BOOL, "ids with their texts"),
    MODEL,
)
DETOKENIZE = (_B("tokens", TOKENS, "token ids"), MODEL)
SLOT_FILE = (_B("filename", TEXT, "a plain name in the folder; not for erase"), MODEL)
LOOKUP = (_B("conversation_ids", TEXTS, "whose streams are meant, those called `ID::...` included"),)
ROUTER_MODEL = (_B("model", TEXT, "`USER/MODEL:QUANT`, or the name that `/models` shows", required=True),)
