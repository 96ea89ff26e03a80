"""The one table of request fields (name, aliases, type, limits, default) and the reader that applies it to a JSON body.

Rules: null is absent; unknown fields are ignored; of a field and its aliases the first present wins; hard limits
refuse, soft limits clamp; booleans given for numbers are 0 or 1; fractions given for integers are cut. A field of a
feature that does not exist here is refused unless its value is neutral, so that nothing is ignored silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pyllama.server.errors import InvalidRequest, NotSupported, ServerFault
from pyllama.server.generation_params import GenerationParams
from pyllama.server.json_codec import type_name
from pyllama.server.sampling_params import SamplingParams

INT_MAX = 2**31 - 1
INT_MIN = -(2**31)
INT64_MAX = 2**63 - 1
FLOAT_MAX = 3.4028234663852886e38
REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")


@dataclass(frozen=True, slots=True)
class RequestField:
    """One row. Limits are hard unless `soft`.

    `kind`: bool, int, uint32, float, text, schema (an object), strings (a list), or text_or_list.
    """

    name: str
    kind: str
    help: str
    aliases: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    soft: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


_F = RequestField

REQUEST_FIELDS: tuple[RequestField, ...] = (
    _F("stream", "bool", "answer with server-sent events"),
    _F("verbose", "bool", "add `__verbose`, the native result, to OpenAI-style answers"),
    _F("timings_per_token", "bool", "`timings` in every partial result"),
    _F("return_tokens", "bool", "token ids in `tokens` (native, not streamed)"),
    _F("return_progress", "bool", "prompt progress events (streamed)"),
    _F(
        "sse_ping_interval",
        "int",
        "seconds of silence before a comment line is sent; <= 0: never",
        low=-1,
        high=INT_MAX,
    ),
    _F("cache_prompt", "bool", "reuse the common prefix of what a slot holds"),
    _F(
        "n_predict",
        "int",
        "token budget; -1: the server's",
        aliases=("max_completion_tokens", "max_tokens"),
        low=-1,
        high=INT_MAX,
    ),
    _F("n_keep", "int", "tokens kept at a context shift", low=-1, high=INT_MAX),
    _F("n_discard", "int", "tokens dropped per context shift", low=0, high=INT_MAX),
    _F("n_indent", "int", "stop at a line indented by fewer blanks", low=0, high=INT_MAX),
    _F("n_cmpl", "int", "completions per prompt, at most the number of slots", aliases=("n",), low=1),
    _F(
        "n_cache_reuse",
        "int",
        "least number of tokens that a slot reuses at another place; 0: none",
        low=0,
        high=INT_MAX,
    ),
    _F("t_max_predict_ms", "int", "time limit that acts at a line break", low=-1, high=INT64_MAX),
    _F("response_fields", "strings", "paths to keep of the native final result; empty: all"),
    _F("id_slot", "int", "slot to use, modulo the number of slots; -1: any"),
    _F("n_probs", "int", "log-probabilities of the N most likely tokens", aliases=("logprobs",)),
    _F("post_sampling_probs", "bool", "probabilities after the sampler chain instead"),
    _F("grammar", "text", "GBNF grammar that the answer keeps to; empty: none"),
    _F("json_schema", "schema", "JSON schema that the answer keeps to, unless `grammar` is given; `{}`: any object"),
    _F("grammar_lazy", "bool", "`grammar` begins where one of `grammar_triggers` is met"),
    _F(
        "reasoning_budget_tokens",
        "int",
        "tokens that a thinking block may have; -1: as the server says",
        aliases=("thinking_budget_tokens",),
        low=-1,
        high=INT_MAX,
    ),
    _F("reasoning_budget_message", "text", "written before the end tag when that budget is used up"),
    _F("reasoning_control", "bool", "a thinking block may be ended by `/v1/chat/completions/control`"),
    _F("backend_sampling", "bool", "sample on the device; has no effect, as the results are the same"),
    _F("stop", "text_or_list", "texts that end the generation; empty: the server's"),
    # sampling
    _F("seed", "uint32", "4294967295 or -1: random"),
    _F("temperature", "float", "0: greedy", low=0, soft=True),
    _F("dynatemp_range", "float", "half width of the temperatures chosen by entropy; 0: off"),
    _F("dynatemp_exponent", "float", "used with dynatemp_range"),
    _F("top_k", "int", "0: off", low=0, high=INT_MAX, soft=True),
    _F("top_p", "float", "1: off", low=0, high=1, soft=True),
    _F("min_p", "float", "0: off", low=0, high=1, soft=True),
    _F("top_n_sigma", "float", "standard deviations below the best logit; <= 0: off"),
    _F("xtc_probability", "float", "chance of dropping the likeliest tokens; 0: off", low=0, high=1, soft=True),
    _F("xtc_threshold", "float", "used with xtc_probability", low=0, high=1, soft=True),
    _F("typical_p", "float", "locally typical; 1: off"),
    _F("repeat_last_n", "int", "window of the penalties; 0: off", low=0, high=INT_MAX),
    _F("repeat_penalty", "float", "finite and > 0; 1: off"),
    _F("presence_penalty", "float", "0: off"),
    _F("frequency_penalty", "float", "0: off"),
    _F("dry_multiplier", "float", "penalty of continued repetitions; 0: off"),
    _F("dry_base", "float", "used with dry_multiplier; < 1: the server's"),
    _F("dry_allowed_length", "int", "used with dry_multiplier", low=0, high=INT_MAX),
    _F("dry_penalty_last_n", "int", "used with dry_multiplier", low=0, high=INT_MAX),
    _F("dry_sequence_breakers", "strings", "used with dry_multiplier; 1 to 64 strings"),
    _F("mirostat", "int", "1 or 2: instead of `samplers`; 0: off", low=0, high=2, soft=True),
    _F("mirostat_tau", "float", "used with mirostat"),
    _F("mirostat_eta", "float", "used with mirostat"),
    _F("adaptive_target", "float", "used with the sampler adaptive_p; < 0: an ordinary draw", high=1, soft=True),
    _F("adaptive_decay", "float", "used with the sampler adaptive_p", low=0, high=0.99),
    _F("min_keep", "int", "candidates that truncating samplers leave at least", low=0, high=INT_MAX),
    _F("ignore_eos", "bool", "ban the end-of-generation tokens"),
)

_SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams))

SAMPLER_NAMES: dict[str, str] = {
    alias: name
    for name, aliases in {
        "penalties": ("penalties", "e"),
        "dry": ("dry", "d"),
        "top_n_sigma": ("top_n_sigma", "top-n-sigma", "topnsigma", "s"),
        "top_k": ("top_k", "top-k", "topk", "k"),
        "typ_p": ("typ_p", "typ-p", "typp", "typ", "y"),
        "top_p": ("top_p", "top-p", "topp", "nucleus", "p"),
        "min_p": ("min_p", "min-p", "minp", "m"),
        "xtc": ("xtc", "x"),
        "temperature": ("temperature", "temp", "t"),
        "infill": ("infill", "i"),
        "adaptive_p": ("adaptive_p", "adaptive-p", "adaptivep", "a"),
    }.items()
    for alias in aliases
}

# Fields without a row above. Value: is it neutral?
UNSUPPORTED_FIELDS: dict[str, Callable[[Any], bool]] = {
    "chat_format": lambda v: v in (0, "Content-only") and v is not False,
    "chat_parser": lambda v: v == "",
    "parse_tool_calls": lambda v: v is False,
    "echo": lambda v: v is False,
}

# JSON types of these fields where they exist: another type is the client's mistake (400), not a missing feature.
_UNSUPPORTED_TYPES: dict[str, tuple[str, ...]] = {
    "chat_format": ("number", "string"),
    "chat_parser": ("string",),
    "parse_tool_calls": ("boolean",),
    "echo": ("boolean",),
}


def wrong_type(name: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"Field '{name}': type must be {expected}, but is {type_name(value)}")


def out_of_range(name: str, low: float, high: float, value: object) -> InvalidRequest:
    shown = str(int(value) if isinstance(value, bool) else value)
    if len(shown) > 40:
        shown = f"{shown[:37]}..."
    return InvalidRequest(f"Field '{name}': Value must be between {low} <= value <= {high}, but got {shown}")


def read_value(field: RequestField, name: str, value: Any) -> Any:
    """Check and convert one present value. `name`: the spelling the client used."""
    kind = field.kind
    if kind == "bool":
        if not isinstance(value, bool):
            raise wrong_type(name, "boolean", value)
        return value
    if kind in ("int", "uint32", "float"):
        if not isinstance(value, (bool, int, float)):
            raise wrong_type(name, "number", value)
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"Field '{name}': must be a finite number, but is too large")
        return _read_number(field, name, value)
    if kind == "text":
        if not isinstance(value, str):
            raise wrong_type(name, "string", value)
        return value
    if kind == "schema":
        return schema_text(name, value)
    if kind == "text_or_list" and isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type(name, "string or array" if kind == "text_or_list" else "array", value)
    for item in value:
        if not isinstance(item, str):
            raise InvalidRequest(f"Field '{name}': elements must be strings, but found {type_name(item)}")
    return tuple(value)


def schema_text(name: str, schema: Any) -> str:
    """A JSON schema as a value that cannot change; what it says is checked when it is compiled."""
    if not isinstance(schema, dict):
        raise wrong_type(name, "object", schema)
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidRequest(f"Field '{name}': nested too deeply") from None


def read_flag(value: Any, name: str, default: bool) -> bool:
    """A boolean that is not in the table, because only one route knows it."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "boolean", value)
    return value


def _read_number(field: RequestField, name: str, value: bool | int | float) -> int | float:
    if field.kind == "float":
        # Beyond single precision a number is beyond every limit; an integer may even be beyond double precision.
        low = -FLOAT_MAX if field.low is None else field.low
        high = FLOAT_MAX if field.high is None else field.high
        number: int | float = float(max(-(10**300), min(10**300, value)))
    else:
        if field.kind == "uint32":
            return int(value) % (1 << 32)
        low = INT_MIN if field.low is None else int(field.low)
        high = INT_MAX if field.high is None else int(field.high)
        number = int(value)
    if low <= number <= high:
        return number
    if not field.soft:
        raise out_of_range(name, low, high, value)
    return min(max(number, low), high)


def present(body: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any] | None:
    """The first of `names` that is in the body and not null."""
    for name in names:
        value = body.get(name)
        if value is not None:
            return name, value
    return None


def read_params(
    body: Mapping[str, Any],
    defaults: GenerationParams,
    *,
    n_slots: int,
    logit_bias: Callable[[Any], tuple[tuple[int, float], ...]],
    ban_end_tokens: Callable[[SamplingParams], SamplingParams],
) -> GenerationParams:
    """Body and server-wide defaults -> the request's parameters.

    logit_bias: turns the body's field into (token, bias) pairs. ban_end_tokens: applied when `ignore_eos` is on.
    Raises `InvalidRequest` (400) or `NotSupported` (501), naming the field.
    """
    general: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    if not _are_breakers(body.get("dry_sequence_breakers")):
        raise InvalidRequest(
            "Field 'dry_sequence_breakers': Error: dry_sequence_breakers must be a non-empty array of strings"
        )
    for field in REQUEST_FIELDS:
        found = present(body, field.names)
        if found is not None:
            limited = replace(field, high=n_slots) if field.name == "n_cmpl" else field
            (sampling if field.name in _SAMPLING_NAMES else general)[field.name] = read_value(limited, *found)

    if not general.get("stop", ("",)):
        del general["stop"]  # an empty list falls back to the server's
    if general.get("reasoning_budget_tokens") == -1:
        del general["reasoning_budget_tokens"]
    general["n_probs"] = max(0, general.get("n_probs", defaults.n_probs))
    if "grammar" in general:  # one kind of constraint at a time, and what the request says replaces the server's
        general["json_schema"] = ""
    elif "json_schema" in general:
        general["grammar"] = ""
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise wrong_type("stream_options", "object", options)
        usage = options.get("include_usage")
        if usage is not None:
            if not isinstance(usage, bool):
                raise wrong_type("include_usage", "boolean", usage)
            general["include_usage"] = usage
    reasoning = body.get("reasoning_format")
    if reasoning is not None:
        general["reasoning_format"] = _plain_reasoning_format(reasoning)

    if sampling.get("dry_base", 1.0) < 1.0:
        del sampling["dry_base"]
    if body.get("samplers") is not None:
        sampling["samplers"] = read_samplers(body["samplers"])
    if body.get("logit_bias") is not None:
        sampling["logit_bias"] = logit_bias(body["logit_bias"])

    params = replace(defaults, sampling=replace(defaults.sampling, **sampling), **general)
    if params.sampling.ignore_eos:
        params = replace(params, sampling=ban_end_tokens(params.sampling))
    _refuse_unsupported(body)
    return params


def _are_breakers(value: Any) -> bool:
    return value is None or (isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value))


def read_reasoning_format(value: Any) -> str:
    """One of `REASONING_FORMATS`. Raises `InvalidRequest`, or `ServerFault` where llama-server answers 500."""
    if not isinstance(value, str):
        raise wrong_type("reasoning_format", "string", value)
    if value not in REASONING_FORMATS:
        raise ServerFault(f"Unknown reasoning format: {value}")
    return value


def _plain_reasoning_format(value: Any) -> str:
    """The same where nothing but content can be answered."""
    value = read_reasoning_format(value)
    if value not in ("none", "auto"):
        raise NotSupported(
            f"Field 'reasoning_format': '{value}' is only supported in chats; 'none' leaves thoughts in the content"
        )
    return value


def read_samplers(value: Any) -> tuple[str, ...]:
    """`samplers`: a list of names, or a string of letters. Unknown entries are skipped."""
    if isinstance(value, str):
        names = list(value)
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, str):
                raise InvalidRequest(f"Field 'samplers': elements must be strings, but found {type_name(item)}")
        names = [name for name in value if len(name) > 1]
    else:
        raise wrong_type("samplers", "array or string", value)
    return tuple(SAMPLER_NAMES[name.lower()] for name in names if name.lower() in SAMPLER_NAMES)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, is_neutral in UNSUPPORTED_FIELDS.items():
        value = body.get(name)
        if value is None:
            continue
        expected = _UNSUPPORTED_TYPES.get(name)
        if expected is not None and type_name(value) not in expected:
            raise wrong_type(name, " or ".join(expected), value)
        if not is_neutral(value):
            raise NotSupported(f"Field '{name}': this feature is not supported yet")


def fields_markdown() -> str:
    """The table of docs/server.md, which a test compares with this."""
    lines = ["| field (aliases) | type | limits | default | effect |", "|---|---|---|---|---|"]
    for field in REQUEST_FIELDS:
        owner = SamplingParams() if field.name in _SAMPLING_NAMES else GenerationParams()
        aliases = f" ({', '.join(field.aliases)})" if field.aliases else ""
        lines.append(
            f"| {field.name}{aliases} | {_KIND_NAMES[field.kind]} | {_limits_text(field)} | "
            f"{_default_text(getattr(owner, field.name))} | {field.help} |"
        )
    return "\n".join(lines) + "\n"


_KIND_NAMES = {
    "bool": "bool",
    "int": "integer",
    "uint32": "integer",
    "float": "number",
    "text": "string",
    "schema": "object",
    "strings": "strings",
    "text_or_list": "string or strings",
}


def _limits_text(field: RequestField) -> str:
    if field.low is None and field.high in (None, INT_MAX):
        return ""
    low = "" if field.low is None else f"{field.low:g}"
    high = "" if field.high in (None, INT_MAX, INT64_MAX) else f"{field.high:g}"
    return f"{low}..{high} {'clamped' if field.soft else 'refused'}"


def _default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(f"`{item}`".replace("\n", "\\n") for item in value)
    return str(value)
