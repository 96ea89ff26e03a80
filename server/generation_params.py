"""The parameters of one generation request, as a value: sampling, limits, and what the answer shall contain."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from pyllama.chat.tool_sets import ToolSet
from pyllama.grammar import GrammarSource
from pyllama.grammar.guide import BudgetRules, ThinkingRules
from pyllama.grammar.triggers import Trigger
from pyllama.server.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Values after server defaults, limits and clamping. Field meanings: the table in request_fields.py."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    include_usage: bool = False
    verbose: bool = False
    timings_per_token: bool = False
    return_tokens: bool = False
    return_progress: bool = False
    sse_ping_interval: int = 30
    cache_prompt: bool = True
    n_predict: int = -1
    n_keep: int = 0
    n_discard: int = 0
    n_indent: int = 0
    n_cmpl: int = 1
    n_cache_reuse: int = 0
    t_max_predict_ms: int = -1
    response_fields: tuple[str, ...] = ()
    id_slot: int = -1
    n_probs: int = 0
    post_sampling_probs: bool = False
    grammar: str = ""
    json_schema: str = ""  # JSON text
    grammar_lazy: bool = False
    grammar_triggers: tuple[Trigger, ...] = ()  # of a lazy grammar
    reasoning_budget_tokens: int = -1
    reasoning_budget_message: str = ""
    reasoning_control: bool = False
    backend_sampling: bool = False
    stop: tuple[str, ...] = ()
    reasoning_format: str = "none"
    preserved_tokens: frozenset[int] = frozenset()  # control tokens that are part of the text all the same
    echo: bool = False
    adapter_scales: tuple[float, ...] = ()  # of each LoRA adapter
    scores_prompt: bool = False  # log-probabilities of the prompt tokens as well
    speculative_types: str = "none"  # the server's drafters, comma separated: for display
    tools: ToolSet | None = None  # that calls in the answer keep to
    thinking: ThinkingRules | None = None  # the block that a schema, calls and lazy grammars wait for
    budget: BudgetRules | None = None
    given: str = ""  # of the answer, in the prompt
    chat_format: str = "Content-only"
    generation_prompt: str = ""

    @property
    def applied_scales(self) -> tuple[float, ...]:
        """`adapter_scales` as the engine compares them: empty when no adapter has any effect."""
        return self.adapter_scales if any(self.adapter_scales) else ()

    @property
    def grammar_source(self) -> GrammarSource | None:
        """What the answer must keep to; tools are another matter."""
        if self.grammar:
            return GrammarSource("gbnf", self.grammar)
        return GrammarSource("json_schema", self.json_schema) if self.json_schema else None

    @property
    def steers(self) -> bool:
        """Something besides the sampler says which tokens may be drawn."""
        return (
            self.tools is not None or self.grammar_source is not None or (self.budget is not None and self.budget.acts)
        )

    def budget_rules(self, start: str, ends: tuple[str, ...], *, prompt: str) -> BudgetRules:
        """The limit on thoughts between these tags."""
        return BudgetRules(
            start, ends, self.reasoning_budget_tokens, self.reasoning_budget_message, self.reasoning_control, prompt
        )


def single_precision(value: float) -> float:
    """The number as the engine holds it: 0.8 is 0.800000011920929."""
    return float(
        struct.unpack("f", struct.pack("f", max(-3.4028234663852886e38, min(3.4028234663852886e38, value))))[0]
    )


def settings_json(params: GenerationParams, *, full: bool = True) -> dict[str, Any]:
    """`generation_settings`. The reduced form (`full=False`) is what `/slots` and `/props` show."""
    s = params.sampling
    f = single_precision
    settings: dict[str, Any] = {
        "seed": s.seed,
        "temperature": f(s.temperature),
        "dynatemp_range": f(s.dynatemp_range),
        "dynatemp_exponent": f(s.dynatemp_exponent),
        "top_k": s.top_k,
        "top_p": f(s.top_p),
        "min_p": f(s.min_p),
        "top_n_sigma": f(s.top_n_sigma),
        "xtc_probability": f(s.xtc_probability),
        "xtc_threshold": f(s.xtc_threshold),
        "typical_p": f(s.typical_p),
        "repeat_last_n": s.repeat_last_n,
        "repeat_penalty": f(s.repeat_penalty),
        "presence_penalty": f(s.presence_penalty),
        "frequency_penalty": f(s.frequency_penalty),
        "dry_multiplier": f(s.dry_multiplier),
        "dry_base": f(s.dry_base),
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": s.dry_penalty_last_n,
        "dry_sequence_breakers": list(s.dry_sequence_breakers),
        "mirostat": s.mirostat,
        "mirostat_tau": f(s.mirostat_tau),
        "mirostat_eta": f(s.mirostat_eta),
        "adaptive_target": f(s.adaptive_target),
        "adaptive_decay": f(s.adaptive_decay),
        "stop": list(params.stop),
        "max_tokens": params.n_predict,
        "n_predict": params.n_predict,
        "n_keep": params.n_keep,
        "n_discard": params.n_discard,
        "ignore_eos": s.ignore_eos,
        "stream": params.stream,
        "logit_bias": [
            {"bias": None if bias == float("-inf") else f(bias), "token": token} for token, bias in s.logit_bias
        ],
        "n_probs": params.n_probs,
        "min_keep": s.min_keep,
        "grammar": params.grammar,
        "grammar_lazy": params.grammar_lazy,
        "grammar_triggers": [trigger.json() for trigger in params.grammar_triggers],
        "preserved_tokens": sorted(params.preserved_tokens),
        "chat_format": params.chat_format,
        "reasoning_format": params.reasoning_format,
        "reasoning_in_content": False,
        "generation_prompt": params.generation_prompt,
        "samplers": list(s.samplers),
        "speculative.types": params.speculative_types,
        "timings_per_token": params.timings_per_token,
        "post_sampling_probs": params.post_sampling_probs,
        "backend_sampling": params.backend_sampling,
        "lora": [{"id": index, "scale": scale} for index, scale in enumerate(params.adapter_scales)],
    }
    if not full:
        for name in FULL_FORM_ONLY:
            del settings[name]
    return settings


FULL_FORM_ONLY = (
    "dry_sequence_breakers",
    "stop",
    "logit_bias",
    "grammar",
    "grammar_lazy",
    "grammar_triggers",
    "preserved_tokens",
)
