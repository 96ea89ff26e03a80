"""Everything that exists once a model is loaded (engine, vocabulary, chat template, defaults), and the loading."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pyllama.chat.tools_as_text import with_calls_as_text, with_tools_as_text
from pyllama.checkpoints import PAGE_TOKENS, PROMPT_GRAIN, checkpoint_rule
from pyllama.dry_breakers import DryBreakerTable
from pyllama.errors import InvalidArgument
from pyllama.host_memory import MEBIBYTE, cache_budget
from pyllama.infill_vocabulary import InfillTable
from pyllama.placement import Placed, explained, place_model
from pyllama.placement_log import load_lines
from pyllama.server.adapters import AdapterFacts, Adapters
from pyllama.server.embedding_tasks import EmbeddingQueue
from pyllama.server.engine_loop import EngineLoop
from pyllama.server.errors import InvalidRequest
from pyllama.server.generation_params import GenerationParams
from pyllama.server.request_fields import SAMPLER_NAMES
from pyllama.server.rerank_prompt import RerankPrompt
from pyllama.server.sampling_params import (
    SamplerParts,
    SamplingParams,
    with_end_tokens_banned,
)
from pyllama.server.settings import SAMPLING_OPTIONS, ServerSettings
from pyllama.server.speculation import SlotSpeculation, open_slot_speculation
from pyllama.server.vocabulary import Vocabulary

log = logging.getLogger("pyllama.server.srv")

# Tokens of each sequence that one engine step may draw (loop_settings.LoopSettings). More would save little.
MAX_PASSES = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`facts`: what `/models` and `/props` say about the file (keys: see `model_facts`).

    n_ctx: tokens of the pool that all slots share; n_ctx_slot: what one slot may use of it.
    exceeds_original_context: n_ctx does, of a model stretched beyond its first training; longrope then turns otherwise.
    sampler_factory: `pyllama._engine.Sampler`. chat_template: None when the file has none that can be used;
    `template_error` says why. can_shift: tokens can be moved to other positions. shifts_context: full slots go on
    without their oldest tokens. pooling: how embeddings are made; None when the server does not serve them.
    `rerank_prompt`: with pooling `rank`.
    """

    facts: Mapping[str, Any]
    vocabulary: Vocabulary
    engine_loop: EngineLoop
    sampler_factory: Callable[..., Any]
    defaults: GenerationParams
    n_ctx: int
    n_ctx_slot: int
    exceeds_original_context: bool = False
    chat_template: Any = None
    template_error: Exception | None = None
    can_shift: bool = False
    shifts_context: bool = False
    pooling: str | None = None
    rerank_prompt: RerankPrompt | None = None
    adapters: Adapters = field(default_factory=Adapters)
    dry_breakers: DryBreakerTable = field(init=False)
    infill_table: InfillTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dry_breakers", DryBreakerTable(self.tokenizer))
        object.__setattr__(self, "infill_table", InfillTable(self.tokenizer, self.vocabulary.n_vocab))

    @property
    def tokenizer(self) -> Any:
        return self.vocabulary.tokenizer

    @property
    def n_slots(self) -> int:
        return len(self.engine_loop.slots)

    def ban_end_tokens(self, params: SamplingParams) -> SamplingParams:
        return with_end_tokens_banned(params, sorted(self.vocabulary.eog_ids))

    def sampler_parts(self, params: SamplingParams) -> SamplerParts:
        """What the samplers need of the vocabulary. The first time takes a second: not for the event loop's thread.

        Raises `InvalidRequest`.
        """
        try:
            return SamplerParts(
                self.dry_breakers.prepare(params.dry_sequence_breakers) if params.uses_dry else None,
                self.infill_table.prepare() if params.uses_infill else None,
            )
        except InvalidArgument as error:
            raise InvalidRequest(f"Failed to initialize samplers: {error}") from error

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Prompt text of a conversation. Raises `TemplateError`; `InvalidRequest` without a usable template."""
        template = self.template_for(tools)
        capabilities = template.capabilities()
        if tools and not capabilities["supports_tools"]:
            messages = with_tools_as_text(messages, tools, system_role=capabilities["supports_system_role"])
            tools = ()
        if not capabilities["supports_tool_calls"]:
            messages = with_calls_as_text(messages)
        return template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools)

    def template_for(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        """The chat template of a request with these tools. Raises `InvalidRequest` when there is none."""
        if self.chat_template is None:
            raise InvalidRequest(f"this model has no usable chat template: {self.template_error}")
        return (self.chat_template.tool_use if tools else None) or self.chat_template

    def with_suppressed_tokens(self, params: SamplingParams) -> SamplingParams:
        """What the sampler gets: tokens that the model's file forbids are banned as well."""
        banned = tuple((token, -math.inf) for token in sorted(self.tokenizer.suppress_ids))
        return replace(params, logit_bias=params.logit_bias + banned) if banned else params


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def context_sizes(settings: ServerSettings, n_ctx_train: int) -> tuple[int, int]:
    """(tokens of the pool, tokens of a slot). Whole pages; a slot never passes the training length, nor the limit that
    the user set for it.
    """
    limit = settings.kv_unified_per_slot
    total = round_up(settings.n_ctx or limit * settings.n_slots or n_ctx_train, PAGE_TOKENS)
    if settings.kv_unified:
        per_slot = total
    else:
        per_slot = round_up(-(-total // settings.n_slots), PAGE_TOKENS)
        total = per_slot * settings.n_slots
    per_slot = min(per_slot, limit or per_slot)
    if n_ctx_train and per_slot > n_ctx_train:
        log.warning(
            "the slot context (%d) exceeds the training context of the model (%d) - capping", per_slot, n_ctx_train
        )
        per_slot = n_ctx_train
    return total, per_slot


def logged_cache_budget(settings: ServerSettings) -> int:
    """Bytes of host memory for prompts that no slot holds any more and for states; -1: no limit."""
    budget = cache_budget(settings.cache_ram)
    if settings.cache_ram is None:
        log.info("prompt cache: at most %d MiB of host memory (--cache-ram changes that)", budget // MEBIBYTE)
    elif budget < 0:
        log.info("prompt cache: no limit on host memory")
    else:
        log.info("prompt cache: at most %d MiB of host memory%s", settings.cache_ram, "" if budget else ", it is off")
    return budget


# `general.sampling.*` key -> field; used where the user did not give the option.
SAMPLING_KEYS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def defaults_from_metadata(settings: ServerSettings, metadata: Mapping[str, Any]) -> GenerationParams:
    """Server-wide defaults, with the model's own sampling values where the user gave none."""
    changes: dict[str, Any] = {}
    for key, name in SAMPLING_KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        option = SAMPLING_OPTIONS[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and option not in settings.given:
            changes[name] = type(getattr(SamplingParams(), name))(value)
    sequence = metadata.get("general.sampling.sequence")
    if isinstance(sequence, str) and "samplers" not in settings.given:
        changes["samplers"] = tuple(SAMPLER_NAMES[n.lower()] for n in sequence.split(";") if n.lower() in SAMPLER_NAMES)
    if changes.get("mirostat", 0) not in (0, 1, 2):
        log.warning("the model asks for mirostat %d, which nobody knows: mirostat stays off", changes.pop("mirostat"))
    if changes:
        log.info("sampling defaults from the model: %s", changes)
    return replace(settings.defaults, sampling=replace(settings.defaults.sampling, **changes))


def open_model(settings: ServerSettings, placed: Placed) -> Any:
    """The weights. Raises `PyllamaError` or `OSError`."""
    from pyllama._engine import Model

    return Model(
        settings.model,
        n_threads=settings.n_threads_batch or settings.n_threads,
        check_tensors=settings.check_tensors,
        kv_overrides=settings.kv_overrides or None,
        **settings.speculation.model_arguments,
        **placed.arguments,
    )


def place_settings(settings: ServerSettings, sizes: Mapping[str, Any]) -> Placed:
    """Decides where the model lies and how long its context is, and says so. Raises `PyllamaError` or `OSError`."""
    from pyllama.gguf.split_set import check_parts

    if not Path(settings.model).is_file():
        raise FileNotFoundError(f"no such file: {settings.model}")
    check_parts(Path(settings.model))
    asked = settings.n_ctx or settings.kv_unified_per_slot * settings.n_slots
    granule = PAGE_TOKENS if settings.kv_unified else PAGE_TOKENS * settings.n_slots
    placed = place_model(
        settings.placement,
        settings.model,
        n_ctx=round_up(asked, granule),
        may_shrink=asked == 0,
        granule=granule,
        sizes=sizes,
        draft=settings.speculation.draft_to_place(sizes),
        kv_overrides=settings.kv_overrides or None,
        **settings.speculation.model_arguments,
    )
    for line in placed.lines:
        log.info("%s", line)
    for warning in (*placed.warnings, *settings.speculation.placement_warnings(placed.arguments["devices"])):
        log.warning("%s", warning)
    for line in load_lines(placed):
        log.info("%s", line)
    return placed


def load_model(settings: ServerSettings, deliver: Callable[..., None]) -> LoadedModel:
    """Read the file, build the engine and start its thread. Raises `PyllamaError` or `OSError`."""
    from pyllama._engine import EmbeddingWork, Engine, HiddenPool, LogitsRow, Sampler, Work
    from pyllama.adapters import load_adapters, load_control_vector
    from pyllama.embeddings import EMBEDDED_TOGETHER, read_pooling_type
    from pyllama.server.chat_templates import load_template
    from pyllama.server.loop_settings import LoopSettings
    from pyllama.tokenizer import Tokenizer

    log.info("loading model '%s'", settings.model)
    settings = replace(settings, speculation=settings.speculation.resolved())
    sizes = {
        "n_seq_max": settings.n_slots + (EMBEDDED_TOGETHER if settings.embeddings else 0),
        "n_ubatch": min(settings.n_ubatch, settings.n_batch),
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "swa_full": settings.swa_full,
    }
    placed = place_settings(settings, sizes)
    settings = replace(settings, speculation=settings.speculation.placed(placed.draft))
    with explained(placed):
        model = open_model(settings, placed)
    metadata = model.metadata
    pooling = read_pooling_type(settings.pooling, model) if settings.embeddings else None
    n_ctx, n_ctx_slot = context_sizes(replace(settings, n_ctx=placed.n_ctx), model.n_ctx_train)
    cache_bytes = logged_cache_budget(settings)

    engine_arguments = {
        "n_ctx": n_ctx,
        "n_batch": max(settings.n_batch, settings.n_slots + 1),
        "n_threads": settings.n_threads,
        "n_threads_batch": settings.n_threads_batch,
        "cache_bytes": cache_bytes,
        "offload_kqv": settings.placement.kv_offload,
        "n_checkpoints": settings.n_checkpoints,
        **sizes,
        **settings.threads,
        **settings.rope,
    }

    def make_engine(model: Any, adapters: list[Any]) -> Any:
        control = load_control_vector(model, settings.control_vectors, settings.control_layers)
        return Engine(model, adapters=adapters, control=control, **engine_arguments)

    def make_engine_again() -> Any:
        log.info("loading model '%s' again", settings.model)
        again = open_model(settings, placed)
        engine = make_engine(again, load_adapters(again, settings.adapters))
        again.close()  # the engine keeps the weights as long as it needs them
        return engine

    adapters = load_adapters(model, settings.adapters)
    for index, (adapter, (_, scale)) in enumerate(zip(adapters, settings.adapters, strict=True)):
        log.info("LoRA adapter %d: '%s', scale = %g", index, adapter.path, scale)
    with explained(placed):
        engine = make_engine(model, adapters)
    keeps_states = engine.needs_checkpoints and cache_bytes != 0 and settings.n_checkpoints > 0
    if engine.needs_checkpoints and not keeps_states:
        log.warning(
            "without --cache-ram and --ctx-checkpoints a changed prompt of this model is computed from its beginning"
        )
    original_context = settings.rope.get("yarn_orig_ctx") or metadata.get(
        f"{model.architecture}.rope.scaling.original_context_length"
    )
    tokenizer = Tokenizer.from_metadata(metadata)
    vocabulary = Vocabulary(tokenizer, model.n_vocab, shows_special=settings.shows_special)
    vocabulary.grammars.prepare()  # now, while nobody waits for anything else
    source = settings.defaults.grammar_source
    if source is not None:  # requests would fail one by one otherwise
        vocabulary.grammars.compile(source)
    template, template_error = load_template(
        settings.chat_template, metadata, tokenizer, merges_system=settings.merges_system
    )
    if template_error is not None:
        log.warning("chat requests will be refused: %s", template_error)
    log.info(
        "initializing, n_slots = %d, n_ctx_slot = %d, kv_unified = '%s'",
        settings.n_slots,
        n_ctx_slot,
        "true" if settings.kv_unified else "false",
    )
    if settings.defaults.n_cache_reuse > 0 and not engine.can_shift:
        raise InvalidArgument(
            f"--cache-reuse: tokens of a {model.architecture} model cannot be moved to other positions"
        )
    shifts_context = settings.context_shift and engine.can_shift
    if settings.context_shift and not shifts_context:
        log.warning(
            "--context-shift has no effect: tokens of a %s model cannot be moved to other positions; "
            "generation ends when a slot is full",
            model.architecture,
        )
    embeddings, n_embd = None, model.n_embd
    if pooling is not None:
        log.info("embeddings are served, pooling = '%s'", pooling)
        embeddings = EmbeddingQueue(
            engine,
            range(settings.n_slots, settings.n_slots + EMBEDDED_TOGETHER),
            make_work=EmbeddingWork,
            make_pool=lambda: HiddenPool(pooling, n_embd),
            page_tokens=PAGE_TOKENS,
        )

    def make_speculation(engine: Any) -> SlotSpeculation | None:
        with explained(placed):
            return open_slot_speculation(
                settings.speculation,
                engine,
                metadata,
                engine_arguments=engine_arguments,
                ends=vocabulary.eog_ids,
                stops_at_pages=keeps_states,
            )

    engine_loop = EngineLoop(
        engine,
        LoopSettings(
            n_slots=settings.n_slots,
            n_ctx_slot=n_ctx_slot,
            n_batch=settings.n_batch,
            similarity=settings.slot_prompt_similarity,
            mixes_prompts=settings.cont_batching,
            prefill_pace=settings.prefill_pace,
            sleep_seconds=max(0, settings.sleep_idle_seconds),
            max_passes=1 if model.is_recurrent else MAX_PASSES,
            n_embedding_rows=min(settings.n_ubatch, settings.n_batch),
            adds_bos=tokenizer.add_bos,
            checkpoints=checkpoint_rule(tokenizer, settings.checkpoint_min_step) if keeps_states else None,
            prompt_grain=PROMPT_GRAIN if model.is_recurrent else 1,
            can_cut=not model.is_recurrent,
        ),
        make_work=Work,
        make_row=LogitsRow,
        deliver=deliver,
        make_engine=make_engine_again,
        embeddings=embeddings,
        make_speculation=make_speculation,
    )
    defaults = defaults_from_metadata(settings, metadata)
    if settings.speculation.is_on:
        defaults = replace(defaults, speculative_types=",".join(engine_loop.speculation_names))
    loaded = LoadedModel(
        facts=model_facts(model, metadata),
        vocabulary=vocabulary,
        engine_loop=engine_loop,
        sampler_factory=Sampler,
        defaults=defaults,
        n_ctx=n_ctx,
        n_ctx_slot=n_ctx_slot,
        exceeds_original_context=n_ctx > (original_context or n_ctx),
        chat_template=template,
        template_error=template_error,
        can_shift=engine.can_shift,
        shifts_context=shifts_context,
        pooling=pooling,
        rerank_prompt=RerankPrompt.from_metadata(metadata, tokenizer) if pooling == "rank" else None,
        adapters=Adapters(
            [AdapterFacts(adapter.path, adapter.task_name, adapter.prompt_prefix) for adapter in adapters],
            [scale for _, scale in settings.adapters],
        ),
    )
    model.close()  # the engine keeps the weights as long as it needs them
    engine_loop.start()
    return loaded


VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}


def model_facts(model: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_type": VOCAB_TYPES.get(metadata.get("tokenizer.ggml.model", ""), 0),
        "n_vocab": model.n_vocab,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size_bytes,
        "ftype": model.ftype_label,
    }
