"""From options to a loaded `Llama` and to the keyword arguments of its completions."""

import json
import math
import os
from typing import Any

from pyllama.download.model_options import choose_draft_model, choose_model
from pyllama.errors import InvalidArgument
from pyllama.options import Options, adapter_arguments, grammar_from_options, placement_request, rope_arguments
from pyllama.options.sampling import canonical_name
from pyllama.placement import PlacementRequest
from pyllama.speculation import speculation_from_options
from pyllama.thread_placement import engine_thread_options


def load_llama(options: Options) -> Any:
    """Load the model that `options` name, downloaded if need be. Raises DownloadError and the errors of `Llama`."""
    from pyllama import Llama

    grammar_from_options(options)  # a fault in it shows before anything is downloaded or read
    draft = choose_draft_model(options, os.environ)
    model = choose_model(options, os.environ).fetch()
    speculation = speculation_from_options(options, draft.fetch() if draft is not None else "").resolved()
    if speculation.is_synthetic:
        raise InvalidArgument("--spec-synth-len and --spec-synth-rates are for llama-server")
    n_ubatch = min(options.ubatch_size, options.batch_size)
    return Llama(
        model,
        n_ctx=options.ctx_size,
        # One micro-batch per step: the same work in the same order, but Ctrl-C is seen after each.
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        n_threads=_threads(options.threads),
        n_threads_batch=_threads(options.threads_batch),
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        cache_ram=options.cache_ram if options.given("cache_ram") else None,
        ctx_checkpoints=max(0, options.ctx_checkpoints),
        swa_full=options.swa_full,
        context_shift=options.context_shift,
        n_keep=options.keep,
        seed=options.seed,
        kv_overrides=dict(options.override_kv),
        last_n_tokens_size=options.repeat_last_n,
        chat_format=options.chat_template or None,
        draft_model=speculation if speculation.is_on else None,
        verbose=False,
        **_placement(placement_request(options)),
        **rope_arguments(options),
        **adapter_arguments(options),
        **engine_thread_options(options),
    )


def _placement(request: PlacementRequest) -> dict[str, Any]:
    """As `Llama` takes it."""
    return {
        "devices": request.devices,
        "n_gpu_layers": "auto" if request.n_gpu_layers is None else request.n_gpu_layers,
        "split_mode": request.split_mode,
        "main_gpu": request.main_gpu,
        "tensor_split": request.tensor_split,
        "tensor_overrides": request.tensor_overrides,
        "offload_kqv": request.kv_offload,
        "fit": request.fit,
        "fit_target": request.fit_target,
        "fit_ctx": request.fit_ctx,
    }


def sampling_arguments(options: Options, llama: Any) -> dict[str, Any]:
    """Keyword arguments that `create_completion` and `create_chat_completion` share.

    Values that the model file suggests (`general.sampling.*`) replace defaults, not what the user gave.
    """
    arguments: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repeat_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "typical_p": options.typical_p,
        "top_n_sigma": options.top_n_sigma,
        "xtc_probability": options.xtc_probability,
        "xtc_threshold": options.xtc_threshold,
        "dynatemp_range": options.dynatemp_range,
        "dynatemp_exponent": options.dynatemp_exp,
        "dry_multiplier": options.dry_multiplier,
        "dry_allowed_length": options.dry_allowed_length,
        "dry_penalty_last_n": options.dry_penalty_last_n,
        "dry_sequence_breakers": options.dry_sequence_breaker,
        "mirostat_mode": options.mirostat,
        "mirostat_tau": options.mirostat_ent,
        "mirostat_eta": options.mirostat_lr,
        "adaptive_target": options.adaptive_target,
        "adaptive_decay": options.adaptive_decay,
        "samplers": options.samplers,
        "frequency_penalty": options.frequency_penalty,
        "max_tokens": options.n_predict if options.n_predict > 0 else None,
        "stop": list(options.reverse_prompt) or None,
    }
    if options.dry_base >= 1:  # anything below leaves the default
        arguments["dry_base"] = options.dry_base
    for key, dest, argument in (
        ("temp", "temperature", "temperature"),
        ("top_k", "top_k", "top_k"),
        ("top_p", "top_p", "top_p"),
        ("min_p", "min_p", "min_p"),
        ("penalty_repeat", "repeat_penalty", "repeat_penalty"),
        ("xtc_probability", "xtc_probability", "xtc_probability"),
        ("xtc_threshold", "xtc_threshold", "xtc_threshold"),
        ("mirostat", "mirostat", "mirostat_mode"),
        ("mirostat_tau", "mirostat_ent", "mirostat_tau"),
        ("mirostat_eta", "mirostat_lr", "mirostat_eta"),
    ):
        suggested = llama.metadata.get(f"general.sampling.{key}")
        if suggested is not None and not options.given(dest):
            arguments[argument] = int(float(suggested)) if argument in ("top_k", "mirostat_mode") else float(suggested)
    sequence = llama.metadata.get("general.sampling.sequence")
    if isinstance(sequence, str) and not options.given("samplers"):
        names = map(canonical_name, sequence.split(";"))
        arguments["samplers"] = tuple(name for name in names if name is not None)
    bias: dict[int, float] = {}
    for token, value in options.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    if options.ignore_eos:
        bias.update(dict.fromkeys(llama.tokenizer().eog_ids, -math.inf))
    arguments["logit_bias"] = bias or None
    source = grammar_from_options(options)
    if source is not None:
        from pyllama.grammar import LlamaGrammar

        arguments["grammar"] = LlamaGrammar(source)
    return arguments


def chat_arguments(options: Options) -> dict[str, Any]:
    """Keyword arguments of `create_chat_completion` about thoughts and the template."""
    variables: dict[str, Any] = {
        "enable_thinking": options.reasoning != "off" and options.reasoning_effort != "none",
        "preserve_reasoning": options.reasoning_preserve,
    }
    if options.reasoning_effort not in ("default", "none"):
        variables["reasoning_effort"] = options.reasoning_effort
    variables |= json.loads(options.chat_template_kwargs or "{}")
    return {
        "reasoning_format": "none" if options.skip_chat_parsing else options.reasoning_format,
        "reasoning_budget": options.reasoning_budget,
        "reasoning_budget_message": options.reasoning_budget_message,
        "chat_template_kwargs": variables,
    }


def _threads(count: int | None) -> int | None:
    return count if count is not None and count > 0 else None
