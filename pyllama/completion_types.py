"""The dictionaries that `Llama` returns, in the shape of the OpenAI completion and chat APIs."""

from __future__ import annotations

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int  # without the end-of-generation token
    total_tokens: int


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingData(TypedDict):
    object: Literal["embedding"]
    embedding: list[float] | list[list[float]]  # of the text, without pooling one per token
    index: int


class CreateEmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry per token. The first token of an echoed prompt has None for both values."""

    text_offset: list[int]  # characters from the beginning of the prompt (also when it is not echoed)
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None  # None in every stream chunk but the last


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]


class Completion(CompletionChunk):
    usage: Usage


class ChatTopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class ToolCallFunction(TypedDict):
    name: str
    arguments: str  # the JSON text of an object


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class _ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None  # None: nothing but calls


class ChatMessage(_ChatMessage, total=False):
    reasoning_content: str  # only where thoughts are told apart, and there are some
    tool_calls: list[ChatToolCall]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ToolCallDelta(TypedDict, total=False):
    """First of a call: everything, with empty arguments. Then: `index` and a function with `arguments` only."""

    index: int
    id: str
    type: Literal["function"]
    function: dict[str, str]


class ChatDelta(TypedDict, total=False):
    """First chunk: only `role`. Then one of the others. Last chunk: empty."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
