"""The server's settings as a value, read from the parsed options in one place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyllama.errors import InvalidArgument
from pyllama.options import grammar_from_options, placement_request, rope_arguments
from pyllama.placement import PlacementRequest
from pyllama.server.generation_params import GenerationParams
from pyllama.server.sampling_params import SamplingParams
from pyllama.server.tls import TlsError, TlsFiles, tls_files
from pyllama.speculation import SpeculationOptions, speculation_from_options
from pyllama.thread_placement import engine_thread_options

LARGEST_CONTEXT = 1 << 30  # tokens, as of --ctx-size


class SettingsError(ValueError):
    """An option has a value that the server cannot use."""


@dataclass(frozen=True, slots=True)
class VertexRoutes:
    """Paths that Vertex AI asks for, prefix and all. `health`: empty where it asks for none of its own."""

    predict: str
    health: str = ""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`defaults` are the values that requests start from. `given`: option names that the user set."""

    model: str
    aliases: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    reuse_port: bool = False
    api_keys: tuple[str, ...] = ()
    api_prefix: str = ""
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    has_cors_proxy: bool = False
    timeout: int = 3600
    tls: TlsFiles | None = None
    static_path: str = ""
    vertex: VertexRoutes | None = None
    tags: tuple[str, ...] = ()
    has_metrics: bool = False
    has_props: bool = False
    has_slots: bool = True
    slot_save_path: str = ""
    n_ctx: int = 0
    n_slots: int = 4
    kv_unified_per_slot: int = 0
    kv_unified: bool = True
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    n_threads_batch: int = 0
    threads: Mapping[str, Any] = field(default_factory=dict)  # placement, as the engine takes it
    type_k: str = "f16"
    type_v: str = "f16"
    check_tensors: bool = False
    kv_overrides: Mapping[str, Any] = field(default_factory=dict)
    placement: PlacementRequest = field(default_factory=PlacementRequest)
    rope: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[tuple[str, float], ...] = ()  # LoRA: files and the scales that requests start from
    control_vectors: tuple[tuple[str, float], ...] = ()
    control_layers: tuple[int, int] | None = None  # the first and last that they act on; None: all
    cont_batching: bool = True
    sleep_idle_seconds: int = -1
    prefill_pace: int = 30  # per cent of the time; 0 and 100: no limit
    merges_system: bool = True
    slot_prompt_similarity: float = 0.1
    context_shift: bool = False
    embeddings: bool = False
    pooling: str | None = None  # None: as the model's file says
    embd_normalize: int = 2
    cache_ram: int | None = None  # MiB; -1: no limit, None: as the memory of the machine allows
    n_checkpoints: int = 32
    swa_full: bool = False
    checkpoint_min_step: int = 8192
    n_predict: int = -1
    shows_special: bool = False
    spm_infill: bool = False  # fill-in-the-middle prompts have the suffix first
    chat_template: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill_assistant: bool = True
    reasoning_format: str = "deepseek"
    reasoning: bool = True  # thinking, where the template can switch it
    reasoning_effort: str = ""
    reasoning_preserve: bool = True
    parses_chat: bool = True
    ignore_eos: bool = False
    verbosity: int = 3
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    defaults: GenerationParams = field(default_factory=GenerationParams)
    given: frozenset[str] = frozenset()

    @property
    def model_name(self) -> str:
        """What responses call the model: the alphabetically first alias, else the repository or path as given."""
        return min(self.aliases) if self.aliases else self.model

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"


# SamplingParams field -> option.
SAMPLING_OPTIONS = {
    "seed": "seed",
    "temperature": "temperature",
    "dynatemp_range": "dynatemp_range",
    "dynatemp_exponent": "dynatemp_exp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "typical_p": "typical_p",
    "repeat_last_n": "repeat_last_n",
    "repeat_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr",
    "adaptive_target": "adaptive_target",
    "adaptive_decay": "adaptive_decay",
    "ignore_eos": "ignore_eos",
}


def settings_from_options(options: Any, model: str, draft_model: str = "") -> ServerSettings:
    """`options`: the parsed options of `llama-server`; `model`, `draft_model`: the local files they mean.

    Raises `SettingsError`.
    """
    n_slots = options.parallel if options.parallel > 0 else 4
    given = frozenset(dest for dest in options.values if options.given(dest))
    sampling = SamplingParams(
        **{name: getattr(options, dest) for name, dest in SAMPLING_OPTIONS.items()},
        dry_base=options.dry_base if options.dry_base >= 1 else SamplingParams().dry_base,
        dry_sequence_breakers=tuple(options.dry_sequence_breaker),
        samplers=tuple(options.samplers),
        logit_bias=tuple((int(token), float(bias)) for token, bias in options.logit_bias),
    )
    return ServerSettings(
        model=model,
        aliases=tuple(options.alias) or ((options.hf_repo,) if options.hf_repo else ()),
        hosts=tuple(options.host),
        port=options.port,
        reuse_port=options.reuse_port,
        api_keys=tuple(options.api_key),
        api_prefix=options.api_prefix.rstrip("/"),
        cors_origins="localhost" if options.ui_mcp_proxy and "cors_origins" not in given else options.cors_origins,
        cors_methods=options.cors_methods,
        cors_headers=options.cors_headers,
        cors_credentials=options.cors_credentials,
        has_cors_proxy=options.ui_mcp_proxy,
        timeout=options.timeout,
        tls=_tls(options),
        static_path=_existing_folder("--path", options.path),
        tags=tuple(options.tags),
        has_metrics=options.metrics,
        has_props=options.props,
        has_slots=options.slots,
        slot_save_path=_existing_folder("--slot-save-path", options.slot_save_path),
        n_ctx=options.ctx_size,
        n_slots=n_slots,
        kv_unified_per_slot=_tokens_per_slot(options, n_slots),
        kv_unified=options.kv_unified or options.parallel <= 0,
        n_batch=options.batch_size,
        n_ubatch=options.ubatch_size,
        n_threads=max(0, options.threads),
        n_threads_batch=max(0, options.threads_batch or 0),
        threads=engine_thread_options(options),
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        check_tensors=options.check_tensors,
        kv_overrides=dict(options.override_kv),
        placement=_placement(options),
        rope=rope_arguments(options),
        adapters=tuple((path, 0.0 if options.lora_init_without_apply else scale) for path, scale in options.adapters),
        control_vectors=options.control_vectors,
        control_layers=options.control_vector_layer_range,
        cont_batching=options.cont_batching,
        sleep_idle_seconds=options.sleep_idle_seconds,
        prefill_pace=options.prefill_pace,
        merges_system=options.merge_system_messages,
        slot_prompt_similarity=options.slot_prompt_similarity,
        context_shift=options.context_shift,
        embeddings=options.embeddings or options.reranking,
        pooling=_pooling(options),
        embd_normalize=options.embd_normalize,
        cache_ram=options.cache_ram if "cache_ram" in given else None,
        n_checkpoints=max(0, options.ctx_checkpoints),
        swa_full=options.swa_full or options.context_shift or options.cache_reuse > 0,  # what is moved must be there
        checkpoint_min_step=options.checkpoint_min_step,
        n_predict=options.n_predict,
        shows_special=options.special,
        spm_infill=options.spm_infill,
        chat_template=options.chat_template,
        chat_template_kwargs=_template_kwargs(options.chat_template_kwargs),
        prefill_assistant=options.prefill_assistant,
        reasoning_format=options.reasoning_format,
        reasoning=options.reasoning != "off",
        reasoning_effort="" if options.reasoning_effort == "default" else options.reasoning_effort,
        reasoning_preserve=options.reasoning_preserve,
        parses_chat=not options.skip_chat_parsing,
        ignore_eos=options.ignore_eos,
        verbosity=options.verbosity,
        speculation=speculation_from_options(options, draft_model),
        defaults=GenerationParams(
            sampling=sampling,
            n_predict=options.n_predict,
            n_keep=options.keep,
            cache_prompt=options.cache_prompt,
            n_cache_reuse=max(0, options.cache_reuse),
            stop=tuple(options.reverse_prompt),
            sse_ping_interval=options.sse_ping_interval,
            verbose=options.verbosity > 9,
            backend_sampling=options.backend_sampling,
            reasoning_format=options.reasoning_format,
            reasoning_budget_tokens=options.reasoning_budget,
            reasoning_budget_message=options.reasoning_budget_message,
            **_constraint(options),
        ),
        given=given,
    )


def _constraint(options: Any) -> dict[str, str]:
    """What all answers keep to. Whether the vocabulary can follow it is checked once the model is loaded."""
    try:
        source = grammar_from_options(options)
    except InvalidArgument as error:
        raise SettingsError(str(error)) from None
    if source is None:
        return {}
    return {"grammar" if source.kind == "gbnf" else "json_schema": source.text}


def _placement(options: Any) -> PlacementRequest:
    try:
        return placement_request(options)
    except InvalidArgument as error:
        raise SettingsError(str(error)) from None


def _tokens_per_slot(options: Any, n_slots: int) -> int:
    limit: int = options.kv_unified_per_slot
    if not options.ctx_size and limit * n_slots > LARGEST_CONTEXT:
        raise SettingsError(
            f"--kv-unified-per-slot: {n_slots} slots of {limit} tokens are more than {LARGEST_CONTEXT} tokens"
        )
    return limit


def _tls(options: Any) -> TlsFiles | None:
    try:
        return tls_files(options.ssl_key_file, options.ssl_cert_file)
    except TlsError as error:
        raise SettingsError(str(error)) from None


def _pooling(options: Any) -> str | None:
    if not options.reranking:
        return options.pooling
    if options.pooling not in (None, "rank"):
        raise SettingsError(f"--reranking ranks: it cannot be used with --pooling {options.pooling}")
    return "rank"


def _existing_folder(option: str, path: str) -> str:
    if path and not Path(path).is_dir():
        raise SettingsError(f"{option}: there is no directory {path}")
    return path


def _template_kwargs(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--chat-template-kwargs: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError("--chat-template-kwargs: must be a JSON object")
    return value
