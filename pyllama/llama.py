"""`Llama`: one model and one sequence of tokens, with the methods that users of llama-cpp-python know."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from pyllama import _engine
from pyllama.adapters import ScaledFile, load_adapters, load_control_vector, read_scaled_files, read_scales
from pyllama.chat_template import TEMPLATE_KEY, ChatTemplate, template_from_metadata
from pyllama.checkpoints import checkpoint_rule
from pyllama.completion import (
    CompletionRequest,
    MoreSampling,
    SamplingOptions,
    TextDelta,
    chat_chunks,
    chat_response,
    collect,
    completion_chunks,
    completion_response,
    iterate,
    prepare,
    prompt_delta,
    read_logit_bias,
    refuse_unsupported,
)
from pyllama.completion_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    CreateEmbeddingResponse,
)
from pyllama.dry_breakers import DryBreakerTable
from pyllama.embeddings import EMBEDDED_TOGETHER, TextEmbedder, as_lists, read_pooling_type
from pyllama.errors import InvalidArgument
from pyllama.gguf.split_set import check_parts
from pyllama.grammar import Constraint, GrammarCompiler, GrammarSource, LlamaGrammar
from pyllama.grammar.guide import Guide
from pyllama.grammar.llama_grammar import source_of
from pyllama.host_memory import cache_budget
from pyllama.infill_vocabulary import InfillTable
from pyllama.llama_chat import MoreChat, ShownTokens, plan_chat, shaped_chunks, shaped_response, split_options
from pyllama.llama_drafts import open_drafts, read_draft_model
from pyllama.llama_placement import find_place, read_placement
from pyllama.llama_sequence import LogitsProcessor, StoppingCriterion, TokenSequence, only_tokens
from pyllama.llama_state import LlamaState, LogitsRows
from pyllama.llama_stream import CallQueue, LockedStream
from pyllama.llama_values import (
    architecture_number,
    cache_type,
    metadata_text,
    read_callables,
    read_count,
    read_n_keep,
    read_seed,
    require_shift,
    rope_scaling,
    token_or_none,
)
from pyllama.placement import explained
from pyllama.tokenizer import Tokenizer

RANDOM_SEED = 0xFFFFFFFF
"""The seed that stands for a new random seed in every call."""


class Llama:
    """A GGUF model, ready to continue text.

    model_path: a GGUF file (the first one, where it is split).
    vocab_only: load only the vocabulary: `tokenize` and `detokenize` work, nothing that computes does.
    kv_overrides: metadata values to replace.
    seed: for calls without their own; 0xFFFFFFFF draws a random one per call.
    n_ctx: tokens of prompt and answer together, rounded up to whole pages of memory; 0 takes the model's own length.
    n_batch, n_ubatch: most tokens per step of prompt processing, and per pass through the model.
    n_threads, n_threads_batch: for generation, and for prompts; None takes all cores, and as `n_threads`.
    thread_cpus, thread_priority, thread_poll: where and how these threads run, as `pyllama._engine.Engine` takes them.
    rope_*, yarn_*: override what the file says; 0 or -1 leave it.
    embedding: make `embed` and `create_embedding` work.
    pooling_type: how they make one vector of a text's hidden states, as number or name: 0 ``"none"`` (a vector for each
    token), 1 ``"mean"``, 2 ``"cls"`` (the first token's), 3 ``"last"``, 4 ``"rank"`` (the scores of a reranker's head);
    -1 as the file says, ``"none"`` when it does not.
    context_shift: when the context is full, drop half of the tokens after the first `n_keep` (-1: after the prompt) and
    go on, instead of ending the answer. A BOS token that the vocabulary begins texts with is kept as well.
    logits_all: keep the logits of every token in `scores` (n_vocab f32 values each), not only of the last one.
    last_n_tokens_size: tokens that the repeat, presence and frequency penalties look back at.
    chat_format: name or Jinja source of a chat template that replaces the one in the file.
    type_k, type_v: type of the KV cache, as name (``"q8_0"``) or GGUF type id; None is f16.
    cache_ram: MiB of host memory for prompts that the sequence no longer holds, and for the states of recurrent models;
    -1: no limit. None: nothing for a model that only attends, which keeps what two calls in a row have in common
    without it; for a recurrent one up to 8192, at most a quarter of the memory to be had.
    ctx_checkpoints: most states of a recurrent model that are kept of one text. Its sequence cannot be cut back, so an
    edited text goes on from the last state before the edit.
    swa_full: False lets layers with a sliding window forget what is behind it. They then take the memory of the window,
    and an edited text goes on from a kept state, as that of a recurrent model does. None is True.
    n_gpu_layers: so many of the last layers, the output matrix counted as one, lie on GPUs; -1 or ``"all"``: all of
    them; ``"auto"``: as many as fit. None: none, or as many as fit on the `devices` that are named. Without a usable
    GPU everything lies on the CPU, and a warning says so.
    devices: what the model runs on; None: all usable GPUs. ``["CPU0", "CPU1"]`` are two ranks on one CPU.
    split_mode: over several devices, 0 or ``"none"`` (all on the one with index `main_gpu`), 1 or ``"layer"`` (whole
    layers), 3 or ``"tensor"`` (a part of every layer). tensor_split: their shares; None: by what is free on them for
    layers, else equal ones.
    fit: what is not given (layers on GPUs; the context, where `n_ctx` is 0) is chosen so that it fits, with
    `fit_target` MiB left free on each device and at least `fit_ctx` tokens of context.
    lora_adapters: LoRA adapter files and their scales, as a mapping or (path, scale) pairs; `set_lora_scales` changes
    the scales later. lora_path, lora_scale: one such file, before those.
    control_vectors: the same for files with directions that are added to the residual stream; control_vector_layers:
    the first and last layer, from 0, after which they are; None: all.
    tensor_overrides: (regular expression, device) pairs that send tensors with a match to one device.
    draft_model: guesses tokens so that several can be computed at once; the text is the same. A path: a smaller model
    with the same vocabulary; `pyllama.SpeculationOptions`: any of the drafters of docs/speculation.md; or a callable
    such as `pyllama.LlamaPromptLookupDecoding`. Used by completions and chats.
    offload_kqv: False keeps the KV cache of layers on GPUs in host memory, which they read through the bus.
    flash_attn, use_mmap, use_mlock, op_offload, no_perf, numa: accepted; they do not change results, and there is
    nothing for them to do.

    Thread-safe: a call runs to its end before the next one on the same object begins; a stream counts as running until
    it is exhausted or closed. `close`, or leaving a ``with`` block, gives the memory back.

    Raises `InvalidArgument` for values out of range or not supported yet, `GgufError`, `ModelError`, `TokenizerError`,
    `OutOfMemory`.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | str | None = None,
        split_mode: int | str = 1,
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        devices: Sequence[str] | None = None,
        tensor_overrides: Sequence[tuple[str, str]] = (),
        fit: bool = True,
        fit_target: Sequence[int] = (1024,),
        fit_ctx: int = 4096,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: Mapping[str, bool | int | float | str] | None = None,
        seed: int = RANDOM_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | str | None = -1,
        pooling_type: int | str = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = -1.0,
        yarn_beta_fast: float = -1.0,
        yarn_beta_slow: float = -1.0,
        yarn_orig_ctx: int = 0,
        thread_cpus: Sequence[Sequence[int]] = (),
        thread_priority: int = 0,
        thread_poll: int = 50,
        context_shift: bool = False,
        n_keep: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | os.PathLike[str] | None = None,
        lora_adapters: Mapping[str, float] | Iterable[ScaledFile] | None = None,
        control_vectors: Mapping[str, float] | Iterable[ScaledFile] | None = None,
        control_vector_layers: tuple[int, int] | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: object | None = None,
        draft_model: object | None = None,
        tokenizer: object | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        cache_ram: int | None = None,
        ctx_checkpoints: int = 32,
        spm_infill: bool = False,
        verbose: bool = True,
    ) -> None:
        self._sequence: TokenSequence | None = None
        self._embedder: TextEmbedder | None = None
        self._shifts = bool(context_shift)
        self._is_closed = False
        self._queue = CallQueue()
        speculation = read_draft_model(draft_model)
        for name, value, neutral in (
            ("lora_base", lora_base, None),
            ("chat_handler", chat_handler, None),
            ("tokenizer", tokenizer, None),
            ("spm_infill", spm_infill, False),
        ):
            if value != neutral:
                raise InvalidArgument(f"{name}={value!r} is not supported yet (only {neutral!r})")
        self.model_path = os.fspath(model_path)
        if not Path(self.model_path).is_file():
            raise InvalidArgument(f"model_path: there is no file {self.model_path!r}")
        self.verbose = verbose
        self.chat_format = chat_format
        self._chat_template: ChatTemplate | None = None
        self._grammars: GrammarCompiler | None = None  # made at the first use
        self._seed = read_seed(seed)
        self._last_n_tokens_size = read_count("last_n_tokens_size", last_n_tokens_size)

        if vocab_only:
            with contextlib.closing(_engine.GgufFile(self.model_path, metadata_only=True)) as file:
                self._metadata: dict[str, Any] = {**file.metadata, **(kv_overrides or {})}
            self._tokenizer = Tokenizer.from_metadata(self._metadata)
            self._n_vocab = self._tokenizer.n_vocab
            self._n_ctx = read_count("n_ctx", n_ctx) or architecture_number(self._metadata, "context_length")
            self._n_embd = architecture_number(self._metadata, "embedding_length")
            return

        adapters = read_scaled_files("lora_path", [] if lora_path is None else [(lora_path, lora_scale)])
        adapters += read_scaled_files("lora_adapters", lora_adapters)
        steering = read_scaled_files("control_vectors", control_vectors)
        n_batch = read_count("n_batch", n_batch, at_least=1)
        engine_options = {
            "n_seq_max": 1 + (EMBEDDED_TOGETHER if embedding else 0),  # this object's sequence is the first
            "n_batch": n_batch,
            "n_ubatch": min(read_count("n_ubatch", n_ubatch, at_least=1), n_batch),
            "n_threads": read_count("n_threads", n_threads or 0),
            "n_threads_batch": read_count("n_threads_batch", n_threads_batch or 0),
            "type_k": cache_type("type_k", type_k),
            "type_v": cache_type("type_v", type_v),
            "rope_scaling_type": rope_scaling(rope_scaling_type),
            "rope_freq_base": rope_freq_base,
            "rope_freq_scale": rope_freq_scale,
            "yarn_orig_ctx": yarn_orig_ctx,
            "yarn_ext_factor": yarn_ext_factor,
            "yarn_attn_factor": yarn_attn_factor,
            "yarn_beta_fast": yarn_beta_fast,
            "yarn_beta_slow": yarn_beta_slow,
            "thread_cpus": thread_cpus,
            "thread_priority": thread_priority,
            "thread_poll": thread_poll,
        }
        n_ctx = read_count("n_ctx", n_ctx)
        n_checkpoints = read_count("ctx_checkpoints", ctx_checkpoints)
        cache_mib = None if cache_ram is None else read_count("cache_ram", cache_ram, at_least=-1)
        check_parts(Path(self.model_path))
        request = read_placement(
            devices=devices,
            n_gpu_layers=n_gpu_layers,
            split_mode=split_mode,
            tensor_split=tensor_split,
            main_gpu=main_gpu,
            tensor_overrides=tensor_overrides,
            fit=fit,
            fit_target=fit_target,
            fit_ctx=fit_ctx,
            offload_kqv=offload_kqv,
        )
        weights: dict[str, Any] = {
            "kv_overrides": kv_overrides,
            **(speculation.model_arguments if speculation is not None else {}),
        }
        keeps_windows = swa_full is None or bool(swa_full) or self._shifts  # what is moved must be there
        sizes = {name: engine_options[name] for name in ("n_seq_max", "n_ubatch", "type_k", "type_v")}
        placed = find_place(
            request,
            self.model_path,
            n_ctx=n_ctx,
            sizes={**sizes, "swa_full": keeps_windows},
            speculation=speculation,
            weights=weights,
            open_needs=_engine.MemoryNeeds,
            verbose=verbose,
        )
        if speculation is not None:
            speculation = speculation.placed(placed.draft)
        with explained(placed):
            model = _engine.Model(self.model_path, n_threads=engine_options["n_threads"], **weights, **placed.arguments)
        with contextlib.ExitStack() as on_error, explained(placed):
            on_error.callback(model.close)
            self._metadata = model.metadata
            self._tokenizer = Tokenizer.from_metadata(self._metadata)
            needs_checkpoints = model.is_recurrent or (model.n_swa > 0 and not keeps_windows)
            # Without states to keep, what two calls have in common is in the sequence itself.
            cache_bytes = cache_budget(cache_mib) if needs_checkpoints or cache_mib is not None else 0
            keeps_states = needs_checkpoints and cache_bytes != 0 and n_checkpoints > 0
            engine = _engine.Engine(
                model,
                adapters=load_adapters(model, adapters),
                control=load_control_vector(model, steering, control_vector_layers),
                n_ctx=placed.n_ctx,
                cache_bytes=cache_bytes,
                n_checkpoints=n_checkpoints,
                offload_kqv=request.kv_offload,
                swa_full=keeps_windows,
                **engine_options,
            )
            on_error.callback(engine.close)
            drafts = open_drafts(
                draft_model, speculation, engine, self._metadata, engine_options, self._tokenizer.eog_ids
            )
            if drafts is not None:
                on_error.callback(drafts.close)
            if self._shifts:
                require_shift(engine, model, keeps_all_logits=bool(logits_all))
            self._n_vocab, self._n_ctx, self._n_embd = model.n_vocab, engine.n_ctx, model.n_embd
            self._sequence = TokenSequence(
                model,
                engine,
                dry_breakers=DryBreakerTable(self._tokenizer),
                infill_table=InfillTable(self._tokenizer, model.n_vocab),
                keep_all_logits=bool(logits_all),
                checkpoints=checkpoint_rule(self._tokenizer) if keeps_states else None,
                n_keep=read_n_keep(n_keep, self._tokenizer) if self._shifts else None,
                drafts=drafts,
            )
            self._pooling_type = read_pooling_type(pooling_type, model)
            if embedding:
                sequences = range(1, 1 + EMBEDDED_TOGETHER)
                self._embedder = TextEmbedder(engine, sequences, self._pooling_type, model.n_embd)
            self._lora_scales: tuple[float, ...] = ()
            self._use_lora_scales(tuple(scale for _, scale in adapters))
            on_error.pop_all()

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, **options: Any) -> NoReturn:
        raise InvalidArgument(f"from_pretrained({repo_id!r}) is not supported yet: download the file and pass its path")

    # -------------------------------------------------------------------------------- facts

    @property
    def metadata(self) -> dict[str, str]:
        """Single metadata values of the file as text, e.g. ``{"general.architecture": "llama"}``; no arrays."""
        return {
            key: metadata_text(value)
            for key, value in self._metadata.items()
            if isinstance(value, (str, bool, int, float))
        }

    def n_ctx(self) -> int:
        """Tokens the context holds."""
        return self._n_ctx

    def n_vocab(self) -> int:
        return self._n_vocab

    def n_embd(self) -> int:
        """Width of the hidden state."""
        return self._n_embd

    def pooling_type(self) -> int:
        """How embeddings are pooled: 0 none, 1 mean, 2 cls, 3 last, 4 rank."""
        self._open_sequence()
        return _engine.pooling_types.index(self._pooling_type)

    @property
    def n_discarded(self) -> int:
        """Tokens that context shifts have dropped so far."""
        return 0 if self._sequence is None else self._sequence.n_discarded

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def token_bos(self) -> int:
        """Beginning-of-sequence token; -1 when the vocabulary has none."""
        return token_or_none(self._tokenizer.bos_id)

    def token_eos(self) -> int:
        """End-of-sequence token; -1 when the vocabulary has none. Other tokens may end a generation too."""
        return token_or_none(self._tokenizer.eos_id)

    def token_nl(self) -> int:
        """The newline token; -1 when a newline takes several tokens."""
        tokens = self._tokenizer.encode("\n", add_special=False, parse_special=False)
        return tokens[-1] if tokens and self._tokenizer.piece(tokens[-1]) == b"\n" else -1

    # -------------------------------------------------------------------------------- tokens

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of `text`, UTF-8 as a rule.

        add_bos: add the tokens the vocabulary wants around a text (nothing, for many).
        special: read special tokens that are spelled out, e.g. ``<|im_end|>``, as such.
        """
        if not isinstance(text, (bytes, bytearray)):
            raise TypeError(f"tokenize takes bytes, found {type(text).__name__}")
        return self._tokenizer.encode(bytes(text), add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of `tokens`, which need not be complete UTF-8. Control tokens have text only with `special`.

        prev_tokens: tokens before `tokens`; without any, a BOS token takes the space after it along.
        """
        ids = self._token_ids(tokens)
        text = b"".join(self._tokenizer.piece(token, special=special) for token in ids)
        at_beginning = not prev_tokens and ids and ids[0] == self._tokenizer.bos_id
        return text[1:] if at_beginning and text.startswith(b" ") else text

    def _token_ids(self, tokens: Sequence[int]) -> list[int]:
        if isinstance(tokens, (str, bytes)):
            raise TypeError(f"token ids must be a sequence of int, found {type(tokens).__name__}")
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise TypeError(f"token ids must be a sequence of int: {error}") from None
        for token in ids:
            if not 0 <= token < self._n_vocab:
                raise InvalidArgument(f"token id {token} is outside the vocabulary of {self._n_vocab} tokens")
        return ids

    # -------------------------------------------------------------------------------- low level

    @property
    def n_tokens(self) -> int:
        """Tokens in the sequence. Assigning a smaller number cuts the sequence."""
        return len(self._tokens())

    @n_tokens.setter
    def n_tokens(self, length: int) -> None:
        with self._call() as sequence:
            if not 0 <= length <= len(sequence.tokens):
                raise InvalidArgument(
                    f"n_tokens={length}: the sequence has {len(sequence.tokens)} tokens and can only be cut"
                )
            sequence.truncate(length)

    @property
    def eval_tokens(self) -> deque[int]:
        """Copy of the tokens in the sequence."""
        return deque(self._tokens(), maxlen=self._n_ctx)

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """Copy of the tokens in the sequence, `[n_tokens]`."""
        return np.array(self._tokens(), np.intc)

    @property
    def scores(self) -> LogitsRows:
        """Logits by token position; see `LogitsRows` for which rows exist."""
        return LogitsRows(self._n_vocab) if self._sequence is None else self._sequence.rows

    def set_seed(self, seed: int) -> None:
        """The seed of calls without their own."""
        with self._call() as sequence:
            self._seed = read_seed(seed)
            sequence.forget_sampler()

    @property
    def lora_scales(self) -> tuple[float, ...]:
        """One for each LoRA adapter, in the order in which they were given."""
        self._open_sequence()
        return self._lora_scales

    def set_lora_scales(self, scales: Sequence[float]) -> None:
        """From here on apply the adapters with these scales, one for each. Forgets the sequence if that changes any.

        Raises `InvalidArgument` for another number of scales and for ones that are not finite.
        """
        with self._call():
            values = read_scales(scales, len(self._lora_scales))
            if values != self._lora_scales:
                self._use_lora_scales(values)

    def _use_lora_scales(self, scales: tuple[float, ...]) -> None:
        sequence = self._open_sequence()
        if scales:
            sequence.use_scales(scales)
            if self._embedder is not None:
                self._embedder.use_scales(scales)
        self._lora_scales = scales

    def reset(self) -> None:
        """Forget the sequence."""
        with self._call() as sequence:
            sequence.clear()

    def eval(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the sequence; keep the logits of the last one (with ``logits_all``, of each) in `scores`.

        Raises `ContextFull`, before anything is computed, when they do not fit.
        """
        ids = self._token_ids(tokens)
        with self._call() as sequence:
            sequence.evaluate(ids)

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        grammar: object | None = None,
        idx: int | None = None,
        logit_bias: Mapping[int | str, float] | None = None,
        **more: Unpack[MoreSampling],
    ) -> int:
        """Draw the token that follows the sequence (or token `idx` of it), without appending it.

        With unchanged arguments the random generator goes on from call to call. `set_seed` and cutting the sequence
        restart it.
        """
        refuse_unsupported(
            {
                "tfs_z": tfs_z,
                "penalize_nl": penalize_nl,
                "grammar": grammar,
            }
        )
        options = self._options(
            temp,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            typical_p=typical_p,
            mirostat=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            **more,
        )
        processors = read_callables(logits_processor)
        with self._call() as sequence:
            return sequence.sample(options, self._seed, processors, idx)

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int | str, float] | None = None,
        **more: Unpack[MoreSampling],
    ) -> LockedStream[int]:
        """Iterator of drawn tokens, end-of-generation tokens too. `stopping_criteria` end it; else `ContextFull`.

        reset: `tokens` replaces the sequence, and what both have in common is not computed again; else it is appended.
        ``send(tokens)`` appends tokens after the one drawn last. Other calls wait until the iterator is closed.
        """
        refuse_unsupported(
            {
                "tfs_z": tfs_z,
                "penalize_nl": penalize_nl,
            }
        )
        options = self._options(
            temp,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            typical_p=typical_p,
            mirostat=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            **more,
        )
        ids = self._token_ids(tokens)
        drawn = self._open_sequence().draw(
            ids,
            options,
            self._seed,
            None,
            read_callables(logits_processor),
            read_callables(stopping_criteria),
            reset=reset,
            constraint=self._constraint(source_of(grammar, None), options),
            n_most=None,
        )
        return LockedStream(self._queue, only_tokens(drawn))

    def _options(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repeat_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        logit_bias: Mapping[int | str, float] | None = None,
        **more: Any,
    ) -> SamplingOptions:
        banned = tuple((token, -math.inf) for token in sorted(self._tokenizer.suppress_ids))
        return SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_last_n=self._last_n_tokens_size,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=read_logit_bias(logit_bias) + banned,
            **more,
        )

    def _constraint(self, source: GrammarSource | None, options: SamplingOptions) -> Constraint | None:
        """The state of a grammar at the beginning of an answer. Raises `GrammarError`."""
        return None if source is None else self._grammar_compiler.compile(source, options.banned)

    @property
    def _grammar_compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._tokenizer, self._n_vocab)
        return self._grammars

    # -------------------------------------------------------------------------------- state

    def save_state(self) -> LlamaState:
        """The sequence as a value, for `load_state` of this object or of one with the same model and cache types."""
        with self._call() as sequence:
            return sequence.save(self._seed)

    def load_state(self, state: LlamaState) -> None:
        """Raises `InvalidArgument` when the state is damaged or another model's; the sequence is then empty."""
        if not isinstance(state, LlamaState):
            raise TypeError(f"load_state takes a LlamaState, found {type(state).__name__}")
        self._token_ids(state.input_ids)
        with self._call() as sequence:
            sequence.load(state)
            self._seed = state.seed

    # -------------------------------------------------------------------------------- completion

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | Sequence[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int | str, float] | None = None,
        **more: Unpack[MoreSampling],
    ) -> Completion | LockedStream[CompletionChunk]:
        """Continue `prompt`: text (special tokens in it are read as such) or token ids.

        grammar: what the answer keeps to. A limit on its length may still cut it off.
        max_tokens: None or <= 0 goes on to the end of the context.
        logprobs: also return that many alternatives per token, with ``echo`` for the prompt too.
        stream: return an iterator of chunks, whose texts put together are the text of the plain answer.
        temperature: 0 takes the most likely token.
        mirostat_mode: 1 or 2 replaces every sampler but the temperature.
        more: the samplers that llama-cpp-python lacks, by name, and `samplers`, their order.

        Raises `InvalidArgument` for a prompt that does not fit and for values out of range, at once in stream mode too.
        """
        self._open_sequence()
        refuse_unsupported(
            {
                "suffix": suffix,
                "tfs_z": tfs_z,
            }
        )
        tokens, text = self._read_prompt(prompt)
        request = prepare(
            tokens,
            text,
            n_ctx=self._n_ctx,
            max_tokens=max_tokens,
            stop=stop,
            echo=echo,
            n_probs=logprobs,
            model=model or self.model_path,
            is_endless=self._shifts,
        )
        options = self._options(
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            typical_p=typical_p,
            mirostat=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            **more,
        )
        deltas = self._complete(
            request,
            options,
            self._seed_of(seed),
            read_callables(logits_processor),
            read_callables(stopping_criteria),
            self._constraint(source_of(grammar, None), options),
        )
        if stream:
            return LockedStream(self._queue, completion_chunks(request, deltas))
        with self._call():
            return completion_response(request, collect(deltas))

    __call__ = create_completion

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int | str, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **more: Unpack[MoreChat],
    ) -> ChatCompletion | LockedStream[ChatCompletionChunk]:
        """Answer the last of `messages`, dictionaries with ``role`` and ``content``, laid out by the chat template.

        logprobs, top_logprobs: return the probability of each token, and of that many alternatives.
        response_format: ``{"type": "json_object"}``, with a ``schema`` if need be, makes the answer a JSON value.
        tools, tool_choice, and by name parallel_tool_calls, reasoning_format ("none" leaves thoughts in the content),
        reasoning_budget, reasoning_budget_message, chat_template_kwargs: docs/python-api.md.
        The other arguments are those of `create_completion`. Also raises `TemplateError`.
        """
        self._open_sequence()
        refuse_unsupported({"functions": functions, "function_call": function_call, "tfs_z": tfs_z})
        if top_logprobs is not None and not logprobs:
            raise InvalidArgument("top_logprobs requires logprobs=True")
        chat_options, sampling = split_options(more)
        plan = plan_chat(
            self._template(with_tools=bool(tools) and tool_choice != "none"),
            self._tokenizer,
            self._grammar_compiler.marker,
            messages,
            tools=tools,
            tool_choice=tool_choice,
            grammar=source_of(grammar, response_format),
            is_schema=grammar is None,
            options=chat_options,
        )
        text = plan.text
        tokens = self._tokenizer.encode(text, add_special=True, parse_special=True)
        request = prepare(
            tokens,
            text,
            n_ctx=self._n_ctx,
            max_tokens=max_tokens,
            stop=stop,
            echo=False,
            n_probs=(top_logprobs or 0) if logprobs else None,
            model=model or self.model_path,
            is_endless=self._shifts,
        )
        options = self._options(
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias,
            typical_p=typical_p,
            mirostat=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            **sampling,
        )
        guide = plan.compile(self._grammar_compiler, self._tokenizer, options.banned)
        processors = read_callables(logits_processor)
        deltas = self._complete(request, options, self._seed_of(seed), processors, (), guide, plan.shown)
        if stream:
            shaped = chat_chunks(request, deltas) if plan.shape is None else shaped_chunks(request, deltas, plan.shape)
            return LockedStream(self._queue, shaped)
        with self._call():
            collected = collect(deltas)
        if plan.shape is None:
            return chat_response(request, collected)
        return shaped_response(request, collected, plan.shape)

    # -------------------------------------------------------------------------------- embeddings

    def create_embedding(
        self,
        input: str | Sequence[str],  # noqa: A002
        model: str | None = None,
    ) -> CreateEmbeddingResponse:
        """The embeddings of `input`, as `embed` gives them, in the shape of the OpenAI API."""
        texts = [input] if isinstance(input, str) else list(input)
        embeddings, n_tokens = self.embed(texts, return_count=True)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "embedding": embedding, "index": index}
                for index, embedding in enumerate(embeddings)
            ],
            "model": model or self.model_path,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def embed(
        self,
        input: str | Sequence[str],  # noqa: A002
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The embedding of a text as list of floats, or of several as list of such; without pooling a list per token.

        normalize: divide each vector by its length.
        truncate: use the beginning of a text that has more than `n_batch` tokens; else such a text is refused.
        return_count: return a pair, the second the number of tokens used.

        The sequence of tokens stays, unless its memory is needed. Raises `InvalidArgument` for a text without tokens
        and for an object that was created without ``embedding=True``.
        """
        self._open_sequence()
        if self._embedder is None:
            raise InvalidArgument("this Llama object was created without embedding=True: it cannot embed")
        texts = [input] if isinstance(input, str) else list(input)
        tokens = self._embedder.read_texts(texts, self.tokenize, truncate=truncate)
        with self._call() as sequence:
            if not self._embedder.fits(max(map(len, tokens), default=0)):
                sequence.truncate(0)
            vectors = self._embedder.embed(tokens)
        results = as_lists(vectors, normalize=normalize)
        output = results[0] if isinstance(input, str) else results
        return (output, sum(map(len, tokens))) if return_count else output

    def _read_prompt(self, prompt: str | Sequence[int]) -> tuple[list[int], str]:
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, add_special=True, parse_special=True)
            text = prompt
        else:
            tokens = self._token_ids(prompt)
            text = self.detokenize(tokens).decode("utf-8", "replace")
        if not tokens and self._tokenizer.bos_id is not None:
            tokens = [self._tokenizer.bos_id]
        return tokens, text

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        """The chat template; with tools the model's own for them, where it has one."""
        variant = "tool_use" if with_tools and not self.chat_format else None
        if variant is not None and f"{TEMPLATE_KEY}.{variant}" in self._metadata:
            return template_from_metadata(self._metadata, self._tokenizer, variant=variant)
        if self._chat_template is None:
            self._chat_template = template_from_metadata(self._metadata, self._tokenizer, override=self.chat_format)
        return self._chat_template

    def _seed_of(self, seed: int | None) -> int:
        return self._seed if seed is None else read_seed(seed)

    def _complete(
        self,
        request: CompletionRequest,
        options: SamplingOptions,
        seed: int,
        processors: Sequence[LogitsProcessor],
        criteria: Sequence[StoppingCriterion],
        constraint: Constraint | Guide | None,
        shown: frozenset[int] = frozenset(),
    ) -> Iterator[TextDelta]:
        """The text of a request, piece by piece, with the control tokens `shown`. Runs inside the queue."""
        tokens, sequence = list(request.tokens), self._open_sequence()
        if request.echo:
            scored = [] if request.n_probs is None else sequence.score(tokens, request.n_probs)
            yield prompt_delta(request, scored, self._tokenizer, self._tokenizer.bos_id)
        drawn = sequence.draw(
            tokens,
            options,
            seed,
            request.n_probs,
            processors,
            criteria,
            constraint=constraint,
            n_most=request.max_tokens,
        )
        with contextlib.closing(drawn):
            yield from iterate(request, drawn, ShownTokens(self._tokenizer, shown) if shown else self._tokenizer)

    # -------------------------------------------------------------------------------- one call at a time

    @contextlib.contextmanager
    def _call(self) -> Iterator[TokenSequence]:
        """Hold the queue for the body; gives the sequence, in agreement with the engine's memory."""
        sequence = self._open_sequence()
        with self._queue.call():
            sequence.reconcile()
            yield sequence

    def _open_sequence(self) -> TokenSequence:
        if self._is_closed:
            raise InvalidArgument("this Llama object is closed")
        if self._sequence is None:
            raise InvalidArgument(
                "this Llama object was created with vocab_only=True: it has no weights to compute with"
            )
        return self._sequence

    def _tokens(self) -> list[int]:
        return [] if self._sequence is None else self._sequence.tokens

    # -------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Give the memory back. Idempotent. Calls that run in other threads end with an error at their next token."""
        self._is_closed = True
        if self._sequence is None:
            return
        self._sequence.is_closing = True
        stream = self._queue.open_stream
        if stream is not None:
            stream.close(InvalidArgument("this Llama object is closed"))
        with self._queue.call():
            self._sequence.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_queue"):  # not there when the constructor refused its arguments
            self.close()
