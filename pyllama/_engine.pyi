"""The engine as Python sees it: thin owners around the C++ objects of `ggml_v100/engine`.

Every call that computes releases the GIL. Every error is a subclass of `pyllama.errors.PyllamaError`.
An `Engine` is driven by one thread at a time: calls from other threads queue on its lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

type_names: tuple[str, ...]
"""GGUF tensor type names, e.g. ``"q4_1"``, in the order of their ids."""

class TypeTraits(NamedTuple):
    id: int  # in GGUF files
    block_values: int
    block_bytes: int
    is_quantized: bool  # False for plain floats and integers

type_traits: dict[str, TypeTraits]
"""Of every tensor type, by name, in the order of the ids."""

class KeyValue(NamedTuple):
    key: str
    type: str  # "u8" .. "i64", "f32", "f64", "bool", "string"; of an array that of its elements and "[]"
    value: Any  # int, float, bool, str; for arrays list[str] or an ndarray

def backend_info() -> dict[str, Any]:
    """``isa`` (what ``auto`` takes), ``available``, ``devices`` that a model can run on, ``cuda`` (compiler of the CUDA
    kernels, or why there are none), and of the build: ``version``, ``build_number`` (commits), ``commit`` (both 0 and
    ``unknown`` outside git), ``compiler``.
    """

def cuda_status() -> dict[str, Any]:
    """CUDA on this machine: ``kernels`` (as ``backend_info()["cuda"]``), ``driver`` (CUDA version, or one line on why
    there is none), ``has_driver``, and ``devices``: dicts of ``device`` (``CUDA0``), ``name``, ``pci_bus_id``,
    ``capability``, ``multiprocessors``, ``total_bytes``, ``free_bytes``, ``ecc``, ``peers`` (ordinals), ``problem``
    (empty, or why it cannot be used).

    Makes a context on each device for a moment. Never raises for a machine without.
    """

def dequantize(type_name: str, data: Buffer, n_values: int) -> NDArray[np.float32]:
    """Decode `n_values` values of packed blocks to f32 (the formulas of the GGUF block formats)."""

def log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """ln Σ exp of each row of `logits` [rows, n_vocab] (C order): a logit less this is its log-probability.

    Raises `PyllamaError` for NaN, +inf and rows of only -inf.
    """

def count_non_finite(type_name: str, data: Buffer, n_values: int) -> int:
    """Values of a float type, or blocks of a quantised one by their scales, that are infinite or NaN."""

def encoding_needs_importance(type_name: str) -> bool:
    """Whether `convert_rows` to this type raises without importance weights."""

def convert_rows(
    source_type: str,
    data: Buffer,
    target_type: str,
    n_columns: int,
    *,
    importance: NDArray[np.float32] | None = None,
    n_threads: int = 0,
) -> NDArray[np.uint8]:
    """Rows of `n_columns` values in another type, as the reference quantisers of the GGUF formats encode them.

    data: a C-contiguous buffer of whole rows. importance: one weight per column; ignored by types that have no use for
    it, when none is positive or one is negative or not finite, and for blocks that it would make NaN. n_threads: 0 is
    one per core; the bytes do not depend on it. Raises `InvalidArgument`.
    """

def quantize(
    type_name: str, values: NDArray[np.float32], importance: NDArray[np.float32] | None = None, n_threads: int = 0
) -> NDArray[np.uint8]:
    """`convert_rows` of f32 values [rows, columns]."""

@final
class GgufFile:
    """A read-only, validated view of a GGUF file and, where it is split, of all its shards.

    metadata_only: the data section may be missing or cut. single_file: of a split model this shard alone, any of them.
    Raises `GgufError` naming the fault.
    """

    def __init__(
        self, path: str | PathLike[str], *, metadata_only: bool = False, single_file: bool = False
    ) -> None: ...
    @property
    def metadata(self) -> dict[str, Any]:
        """Keys in file order. Strings are UTF-8 decoded with ``surrogateescape``: token texts may be any bytes."""
    @property
    def key_values(self) -> list[KeyValue]:
        """Keys with their types, in file order: what a copy of the file must hold."""
    @property
    def version(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def tensors(self) -> list[TensorInfo]: ...
    def tensor_bytes(self, name: str) -> bytes: ...
    def close(self) -> None: ...

class TensorInfo(NamedTuple):
    name: str
    type_name: str
    shape: tuple[int, ...]  # ggml order: shape[0] is contiguous
    offset: int  # absolute file offset of the first byte, within its shard
    n_bytes: int
    shard: int

@final
class Model:
    """Weights of one GGUF model, packed for this machine. Immutable; several engines may share it.

    load_mtp: also the blocks of multi-token prediction, where the file has them; else their memory is not spent.
    mtp_file: such blocks in a file of their own, in the place of those of the model's.
    drafter: a drafter on hidden states (DFlash, DSpark, EAGLE-3) that was made for this model.
    kv_overrides: values that replace metadata on lookup (``--override-kv``).
    isa: ``auto`` or one of ``backend_info()["available"]``; ``reference`` is the plain scalar implementation.
    devices: what the model runs on, of ``backend_info()["devices"]``; none: the CPU. Each is a rank, and several may be
    the same CPU: that is how a split is tried without further hardware.
    split_mode: of several devices, ``none`` uses one (`main_gpu`, an index), ``layer`` gives each whole layers,
    ``tensor`` divides every layer. tensor_split: shares of the devices in any unit, 0 leaves one idle; none: equal.
    tensor_overrides: (regular expression, device) pairs; tensors with a match lie on that device as a whole; ``CPU`` is
    the host, which becomes a rank of its own beside other devices. device_layers: so many of the last layers, the
    output matrix counted as one, lie on the devices, the others on the host; None: all.
    Raises `GgufError`, `ModelError`, `OutOfMemory`, `InvalidArgument`.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        n_threads: int = 0,
        check_tensors: bool = False,
        load_mtp: bool = False,
        mtp_file: str | PathLike[str] | None = None,
        drafter: str | PathLike[str] | None = None,
        kv_overrides: Mapping[str, int | float | bool | str] | None = None,
        isa: str = "auto",
        devices: Sequence[str] = (),
        split_mode: str = "layer",
        tensor_split: Sequence[float] = (),
        main_gpu: int = 0,
        tensor_overrides: Sequence[tuple[str, str]] = (),
        device_layers: int | None = None,
    ) -> None: ...
    @property
    def metadata(self) -> dict[str, Any]:
        """The file's keys with the overrides in place."""
    @property
    def path(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def isa(self) -> str: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def pooling_type(self) -> str:
        """How the file wants embeddings pooled, one of `pooling_types`; ``none`` when it does not say."""
    @property
    def n_labels(self) -> int:
        """Outputs of the classification head; 0: the file has none, and the model cannot rank."""
    @property
    def is_recurrent(self) -> bool:
        """Whether sequences carry a state that cannot be cut back: they are kept and shared whole or not at all."""
    @property
    def n_swa(self) -> int:
        """Tokens that layers with a sliding window see, the row's own included; 0: there are none."""
    @property
    def n_mtp(self) -> int:
        """Loaded blocks of multi-token prediction."""
    @property
    def n_params(self) -> int: ...
    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors in the file."""
    @property
    def ftype_label(self) -> str:
        """``general.file_type`` as loaders print it, e.g. ``Q4_1``; prefixed ``(guessed) `` when the key is missing."""
    @property
    def description(self) -> str:
        """As llama-bench prints it, e.g. ``llama 135M Q4_1``."""
    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank."""
    @property
    def layer_devices(self) -> tuple[str | None, ...]:
        """Of each layer, the device that computes it alone; None: all do at once."""
    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of packed weights on each rank."""
    def close(self) -> None:
        """Give the memory back. Engines that still use the model keep it alive until they are closed. Idempotent."""

@final
class DryBreakers:
    """The sequence breakers of DRY as tokens, shared by samplers: pairs (first token, tokens that follow it).

    `pyllama.dry_breakers` makes them from strings.
    """

    def __init__(self, breakers: Iterable[tuple[int, Sequence[int]]]) -> None: ...

@final
class InfillVocabulary:
    """What the sampler ``infill`` knows of a vocabulary.

    texts: bytes of every token, empty for control tokens. end_tokens: those that end a generation. end: the one that
    stands for them where nothing else is left. Raises `InvalidArgument` for ids outside the texts.
    """

    def __init__(self, texts: Sequence[bytes], end_tokens: Sequence[int], end: int) -> None: ...
    def __len__(self) -> int: ...

@final
class Sampler:
    """One sampler chain with its own random generator and token history.

    Semantics: docs/sampling.md. ``seed`` 0xFFFFFFFF draws a random seed. ``samplers``: chain order, of ``penalties,
    dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, infill, adaptive_p`` (others are refused:
    InvalidArgument). infill_vocabulary: for ``infill``, which is refused without it.
    logit_bias: pairs (token id, bias); ids outside the vocabulary are ignored; ``-inf`` bans.
    Raises `InvalidArgument` for penalties that are not finite or a repeat penalty <= 0.
    """

    def __init__(
        self,
        n_vocab: int,
        *,
        seed: int = 0xFFFFFFFF,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        min_keep: int = 0,
        repeat_last_n: int = 64,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        dynatemp_range: float = 0.0,
        dynatemp_exponent: float = 1.0,
        top_n_sigma: float = -1.0,
        typical_p: float = 1.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = 64,
        dry_breakers: DryBreakers | None = None,
        infill_vocabulary: InfillVocabulary | None = None,
        mirostat: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        adaptive_target: float = -1.0,
        adaptive_decay: float = 0.9,
        logit_bias: Sequence[tuple[int, float]] = (),
        samplers: Sequence[str] = (
            "penalties",
            "dry",
            "top_n_sigma",
            "top_k",
            "typ_p",
            "top_p",
            "min_p",
            "xtc",
            "temperature",
        ),
    ) -> None: ...
    @property
    def seed(self) -> int:
        """The seed in use (the drawn one when a random seed was asked for)."""
    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens to the history that penalties look at (prompt tokens, or a sampled token)."""
    def set_mask(self, mask: NDArray[np.uint32] | None) -> None:
        """Until the next call only tokens t whose bit ``t % 32`` of word ``t // 32`` is set may be drawn; None: all.

        Raises `InvalidArgument` unless there are ceil(n_vocab / 32) words.
        """
    def sample(self, logits: NDArray[np.float32]) -> int:
        """Run the chain on one row of raw logits and return the chosen token id. Does not accept it."""
    def candidates(self) -> list[tuple[int, float]]:
        """(token, probability) of the last `sample` after the chain, sorted by falling probability, zeros dropped."""
    def reset(self) -> None:
        """Forget the history and reseed."""
    def clone(self) -> Sampler: ...

class Work(NamedTuple):
    """What one sequence does in a step: append `tokens`, then, with a sampler, draw the next token from the last row.

    The drawn token is accepted by the sampler and returned, but not appended: it leads `tokens` of the next step.
    n_probs > 0 also returns that many most likely tokens.
    logits: gets the logits of the last row instead of a draw; only without a sampler.

    draft: tokens that are guessed to come next. The sequence gets `tokens` and what the sampler confirms of the draft;
    one output comes for each confirmed token, and one more. proposals: what each drafted token was drawn from, (token,
    probability) pairs, for rejection sampling; none: the likeliest tokens. ends: tokens behind which no draft stands.
    synthetic: for benchmarks. masks: `[len(draft) + 1, words]`, the tokens allowed after `tokens` and after each token
    of the draft, as `Sampler.set_mask` takes them; the last one used stays. None: the sampler's own mask throughout.
    """

    seq_id: int
    tokens: Sequence[int]
    sampler: Sampler | None = None
    n_probs: int = 0
    post_sampling_probs: bool = False
    logits: LogitsRow | None = None
    draft: Sequence[int] = ()
    proposals: Sequence[Sequence[tuple[int, float]]] = ()
    ends: Sequence[int] = ()
    synthetic: SyntheticAcceptance | None = None
    masks: NDArray[np.uint32] | None = None

@final
class LogitsRow:
    """Logits of one row, kept by a step (`Work.logits`) to draw from them later. Reused by the next step."""

    def draw(self, seq_id: int, sampler: Sampler, n_probs: int = 0, post_sampling_probs: bool = False) -> StepOutput:
        """What the step would have returned with this sampler, which accepts the token.

        Raises `InvalidArgument` without logits and where no token is allowed.
        """

@final
class SyntheticAcceptance:
    """Drafted token i stands with probability rates[i], given those before it, whatever the model says."""

    def __init__(self, rates: Sequence[float], seed: int) -> None: ...

class Draft(NamedTuple):
    tokens: Sequence[int]
    proposals: Sequence[Sequence[tuple[int, float]]] = ()  # as in `Work`

class DraftOrder(NamedTuple):
    seq_id: int
    last: int  # token drawn, not computed yet
    most: int  # tokens worth drafting
    temperature: float = 0.0
    seed: int = 0

class DrafterStatistics(NamedTuple):
    """Of one drafter since the start. accepted_at: drafts whose i-th token stood."""

    name: str
    n_begins: int
    n_draft_calls: int
    n_accept_calls: int
    n_drafts: int
    n_accepted_drafts: int
    n_tokens: int
    n_accepted_tokens: int
    accepted_at: list[int]
    begin_ms: float
    draft_ms: float
    accept_ms: float

speculation_types: tuple[str, ...]
"""Of `--spec-type`, in the order of precedence."""

@final
class Speculator:
    """Drafters for the sequences of `target`, docs/speculation.md. Used by the thread that drives it, between steps.

    types: as in `--spec-type`. draft: engine of the draft model, for ``draft-simple``. The n-gram tuples hold sizes n
    and m (and fewest hits); ngram_mod n_match, n_min, n_max. Raises `InvalidArgument`.
    """

    def __init__(
        self,
        target: Engine,
        types: Sequence[str],
        *,
        draft: Engine | None = None,
        draft_n_max: int = 3,
        draft_n_min: int = 0,
        draft_p_min: float = 0.0,
        draft_samples: bool = False,
        ngram_simple: tuple[int, int] = (12, 48),
        ngram_map_k: tuple[int, int, int] = (12, 48, 1),
        ngram_map_k4v: tuple[int, int, int] = (12, 48, 1),
        ngram_mod: tuple[int, int, int] = (24, 48, 64),
        lookup_static: str | PathLike[str] = "",
        lookup_dynamic: str | PathLike[str] = "",
    ) -> None: ...
    @property
    def names(self) -> list[str]:
        """Active drafters in their order."""
    @property
    def longest(self) -> int:
        """Tokens of a draft at most."""
    def begin(self, seq_id: int) -> None:
        """A generation begins with the prompt that the sequence holds."""
    def follow(self, seq_id: int) -> None:
        """A part of a prompt was computed."""
    def draft(self, orders: Sequence[DraftOrder]) -> list[Draft]:
        """One for each order, at most ``most`` tokens, perhaps none."""
    def accept(self, seq_id: int, n_verified: int, n_accepted: int) -> None:
        """What became of the sequence's last draft, which had tokens."""
    def forget(self, seq_id: int) -> None: ...
    def save(self) -> None:
        """Write what drafters have learnt to their files. Raises `PyllamaError`."""
    def statistics(self) -> list[DrafterStatistics]: ...
    def close(self) -> None: ...

pooling_types: tuple[str, ...]
"""``none, mean, cls, last, rank``, in the order of their numbers in files."""

@final
class RankNeeds(NamedTuple):
    """Bytes that a rank takes of its device: matrices and vectors; pages of the KV cache; recurrent states; and, as an
    estimate, the memory of a forward pass."""

    device: str
    weights: int
    kv: int
    states: int
    compute: int

class MemoryNeeds:
    """What a model and an engine will take of each device, from the file's header: nothing is loaded.

    The arguments mean what they mean for `Model` and `Engine`. Raises `GgufError`, `ModelError`.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        load_mtp: bool = False,
        mtp_file: str | PathLike[str] | None = None,
        drafter: str | PathLike[str] | None = None,
        kv_overrides: Mapping[str, int | float | bool | str] | None = None,
        isa: str = "auto",
    ) -> None: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_experts(self) -> int:
        """Of a layer with a mixture of experts; 0: there is none."""
    @property
    def n_ctx_train(self) -> int: ...
    def of(
        self,
        *,
        n_ctx: int,
        n_seq_max: int = 1,
        n_ubatch: int = 512,
        type_k: str = "f16",
        type_v: str = "f16",
        swa_full: bool = True,
        devices: Sequence[str] = (),
        split_mode: str = "layer",
        tensor_split: Sequence[float] = (),
        main_gpu: int = 0,
        tensor_overrides: Sequence[tuple[str, str]] = (),
        device_layers: int | None = None,
    ) -> tuple[RankNeeds, ...]:
        """Of each rank. Raises `InvalidArgument` for what cannot be."""

class HiddenPool:
    """Turns the hidden states of one text into its embedding; see `EmbeddingWork`.

    pooling_type: ``none`` keeps the state of every token, ``mean`` takes their average, ``cls`` the first token's,
    ``last`` the last one's, and ``rank`` what the model's classification head makes of the last one's (of qwen3
    probabilities). n_embd: of the model. Raises `InvalidArgument`.
    """

    def __init__(self, pooling_type: str, n_embd: int) -> None: ...
    @property
    def pooling_type(self) -> str: ...
    @property
    def n_tokens(self) -> int:
        """Of the text so far."""
    @property
    def is_complete(self) -> bool:
        """Whether the text has ended."""
    def values(self) -> NDArray[np.float32]:
        """``[n_embd]``, with ``none`` ``[n_tokens, n_embd]``, with ``rank`` ``[n_labels]``. Not normalised."""

class EmbeddingWork(NamedTuple):
    """Append `tokens` to a sequence; `pool`, which has taken in all tokens of it so far, gets their hidden states."""

    seq_id: int
    tokens: Sequence[int]
    pool: HiddenPool
    ends: bool = True  # the text ends with these tokens

class StepOutput(NamedTuple):
    seq_id: int
    token: int
    logprob: float  # ln softmax(raw logits)[token], or with post_sampling_probs its probability; 0.0 when n_probs is 0
    top: list[tuple[int, float]]  # (id, logprob or probability), falling, n_probs long at most; empty unless asked for

class BlockDraft(NamedTuple):
    """What a drafter of blocks thinks of the D tokens after a sequence's last one.

    tokens: K candidates of each place, by falling logit. scores: of candidate j after candidate i of the place before
    (of the first place: after the last token, the same for all i). confidences: of drafters that say how likely the
    first candidate of a place stands, else None.
    """

    tokens: NDArray[np.int32]  # [D, K]
    scores: NDArray[np.float32]  # [D, K, K]
    confidences: NDArray[np.float32] | None  # [D]

class PrefixReuse(NamedTuple):
    """How a sequence begins now, and why it does not begin with more."""

    length: int  # tokens that it holds
    matched: int  # tokens of the longest beginning that is known, whether usable or not
    source: str  # of the last token's keys and values: "nothing", "own", "other" (a live sequence), "host"
    checkpoint: int  # position of the checkpoint that gave the recurrent state; -1: none was needed
    limit: str  # "" (all tokens), "prompt" (no more was asked for), "no checkpoint", "no page", "not cached"
    moved: int = 0  # tokens at its end that stood elsewhere: not what a cold run gives

class CacheUsage(NamedTuple):
    """Bytes of host memory that hold beginnings of sequences; ``used`` counts pages, checkpoints and nodes."""

    budget: int  # -1: no limit
    used: int
    kv_bytes: int
    checkpoint_bytes: int
    n_nodes: int
    n_checkpoints: int
    n_evicted: int  # nodes dropped to make room, ever

class InputSums(NamedTuple):
    """Of one weight. A stack of experts has a matrix per expert, any other weight one."""

    squares: NDArray[np.float64]  # [matrices, columns] sums of x²
    n_rows: NDArray[np.int64]  # [matrices] rows of x summed

@final
class LoraAdapter:
    """A LoRA adapter file, made ready for one model. Immutable; several engines may share it.

    Raises `GgufError`, `OutOfMemory`; `ModelError` for a file that is no adapter of this model, naming what is wrong.
    """

    path: str

    def __init__(self, model: Model, path: str | PathLike[str], *, n_threads: int = 0) -> None: ...
    @property
    def task_name(self) -> str: ...
    @property
    def prompt_prefix(self) -> str: ...

class ControlVector:
    """Directions that are added to the residual stream: the sum of (path, scale) files.

    first_layer, last_layer: the layers, from 0, after which they are added, both included; 0: no limit.
    Raises `GgufError`, `ModelError` for files that do not fit the model, `InvalidArgument`.
    """

    def __init__(
        self,
        model: Model,
        files: Iterable[tuple[str | PathLike[str], float]],
        *,
        first_layer: int = 0,
        last_layer: int = 0,
    ) -> None: ...

class Engine:
    """Memory for `n_seq_max` sequences over one shared pool of `n_ctx` tokens, and the forward pass over them.

    n_threads / n_threads_batch: threads for passes of at most / more than 64 rows; 0 = all cores / as n_threads.
    type_k, type_v: f32, f16, bf16, q8_0, q4_0.
    thread_cpus: processors of thread i (the caller is thread 0): element i modulo the length; empty: any.
    thread_priority: -1 low, 0 normal, 1 medium, 2 high, 3 realtime. thread_poll: 0 (idle threads sleep at once) to 100.
    cache_bytes: host memory for beginnings of sequences, 0: none, -1: no limit. n_checkpoints: recurrent states or
    windows that it keeps per sequence. offload_kqv: False keeps the KV cache of layers on GPUs in memory of the
    host, which those read through their bus. swa_full: keep what is behind sliding windows; it takes memory, but leaves
    every beginning of a sequence usable.
    adapters: of this model; a sequence chooses a scale for each. control: directions for all sequences.
    Of a model on several ranks in mode ``tensor`` the threads are shared out over the ranks. When a rank fails, a call
    raises `DeviceError` naming it; while it does not return, so does every later call that computes.
    Raises `InvalidArgument` (names the field), `OutOfMemory`.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_seq_max: int = 1,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int = 0,
        n_threads_batch: int = 0,
        type_k: str = "f16",
        type_v: str = "f16",
        rope_scaling_type: str | None = None,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_orig_ctx: int = 0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = -1.0,
        yarn_beta_fast: float = -1.0,
        yarn_beta_slow: float = -1.0,
        thread_cpus: Sequence[Sequence[int]] = (),
        thread_priority: int = 0,
        thread_poll: int = 50,
        cache_bytes: int = 0,
        n_checkpoints: int = 32,
        offload_kqv: bool = True,
        swa_full: bool = True,
        collect_importance: bool = False,
        adapters: Sequence[LoraAdapter] = (),
        control: ControlVector | None = None,
    ) -> None: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_seq_max(self) -> int: ...
    @property
    def n_batch(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def needs_checkpoints(self) -> bool:
        """Whether a sequence can go back only to where `checkpoint` was called, or as far as its windows reach: a
        recurrent model, or one with sliding windows without ``swa_full``.
        """
    @property
    def kv_bytes(self) -> int:
        """Bytes of KV pages for ``n_ctx`` tokens (touched lazily)."""

    # One scheduler iteration.
    def step(self, work: Sequence[Work], n_passes: int = 1) -> list[StepOutput]:
        """Run prompt chunks and decode rows of any set of sequences; one output per work item with a sampler, in order.

        n_passes > 1 goes on from the drawn tokens as if `step` were called again with each as the only token of its
        sequence (items without a sampler take part in the first pass only), and ends early when the next token of a
        sequence finds no page. Outputs come pass by pass. A step with drafts has one pass, and the outputs of a draft
        come in the place of its item; rows of all items with drafts together are at most `n_ubatch`.
        All or nothing: raises `ContextFull` (`seq_id` says who) before any row is computed when the pool lacks pages;
        `InvalidArgument` for token ids outside the vocabulary, an unknown or repeated sequence, an empty item.
        """

    def embed(self, work: Sequence[EmbeddingWork]) -> None:
        """Move any set of texts on towards their embeddings. A text may come in pieces: the embedding is the same.

        All or nothing, as `step`, with the same errors; also `InvalidArgument` for a pool that does not fit its
        sequence or that another item uses, and for ``rank`` with a model without a classification head.
        """

    def draft_blocks(self, work: Sequence[tuple[int, int]], n_draft: int) -> list[BlockDraft]:
        """For each (seq_id, last token, not yet computed) what the model's drafter of blocks thinks of the next tokens.

        Sequences stay as they are. Raises `ContextFull`, `InvalidArgument`.
        """

    # Sequence memory. Lengths are in tokens.
    def length(self, seq_id: int) -> int: ...
    def can_append(self, seq_id: int, n_tokens: int) -> bool: ...
    def free_tokens(self) -> int:
        """Tokens of pages that no sequence holds."""
    def truncate(self, seq_id: int, length: int) -> None:
        """Keep the first `length` tokens.

        InvalidArgument when the sequence is shorter, recurrent and cut inside, or has forgotten the window there.
        """
    def fork(self, src: int, dst: int, length: int) -> None:
        """`dst` becomes the first `length` tokens of `src`, sharing its pages (copy on write). Errors as `truncate`."""
    def clear(self, seq_id: int) -> None: ...
    def pretend(self, seq_id: int, n_tokens: int) -> None:
        """For benchmarks of long contexts: `n_tokens` more tokens of id 0 that nobody has computed; their keys, values
        and state are what the memory holds. Errors as `step`; `InvalidArgument` with ``cache_bytes`` other than 0.
        """
    @property
    def can_shift(self) -> bool:
        """Whether `shift` works: not for recurrent models, for positions of several channels, or without `swa_full`."""
    def shift(self, seq_id: int, n_keep: int, n_discard: int) -> None:
        """Keep the first `n_keep` tokens, drop the next `n_discard`, and move the rest down to their positions.

        The sequence can then go on; what the moved tokens had taken from the dropped ones stays in them. Raises
        `InvalidArgument` for a model that cannot and for counts the sequence does not have, and `ContextFull`, having
        changed nothing, when pages shared with other sequences cannot be copied.
        """

    # Prefix reuse. What a sequence loses goes to host memory as far as ``cache_bytes`` allows.
    def set_adapters(self, seq_id: int, scales: Sequence[float]) -> None:
        """The scale of each adapter for the tokens of this sequence; none: they are not applied, as at first.

        They stay until they are set again, or the sequence becomes another's beginning. InvalidArgument for another
        number of scales, ones that are not finite, and while the sequence holds tokens computed with others.
        """
    def adapters(self, seq_id: int) -> tuple[float, ...]:
        """The scales of a sequence in single precision; empty when no adapter is applied."""
    def reuse_prefix(
        self, seq_id: int, tokens: Sequence[int], most: int, scales: Sequence[float] = (), least_chunk: int = 0
    ) -> PrefixReuse:
        """The sequence becomes the longest reusable beginning of `tokens`, at most `most` of them.

        scales: as of `set_adapters`, what the sequence has from here on; only tokens computed with them are reused.

        It may be what the sequence holds itself, what another one holds (pages are shared) or a copy in host memory. A
        recurrent model can begin where another sequence ends, or at a checkpoint.
        least_chunk > 0: behind the common beginning, runs of at least so many tokens that the sequence itself holds, in
        their order, are moved to where they stand in `tokens`, if that gives more; what they had taken from the tokens
        before them stays in them. Later calls with a `least_chunk` take moved tokens as they are, others do not.
        InvalidArgument for token ids outside the vocabulary, a `most` beyond the tokens, and a `least_chunk` where
        `can_shift` is false.
        """
    def checkpoint(self, seq_id: int) -> None:
        """Keep a copy of the recurrent state, or of the window, at the end of the sequence; see `needs_checkpoints`."""
    def release(self, seq_id: int) -> None:
        """Clear the sequence, keeping what it held in host memory."""
    def cache_usage(self) -> CacheUsage: ...
    def save_sequence(self, seq_id: int) -> bytes:
        """Tokens, KV pages (whole ones of 256 tokens), recurrent state and its checkpoints as bytes."""
    def load_sequence(self, seq_id: int, state: bytes) -> None:
        """The sequence becomes a saved one; its checkpoints go to host memory as far as ``cache_bytes`` allows.

        InvalidArgument with the reason when the state is truncated, damaged or from another model, build, type or
        version. After an error the sequence is empty.
        """

    def importance(self) -> dict[str, InputSums]:
        """What the linear weights were fed in all passes of 16 rows and more, by tensor name: the makings of an
        importance matrix. Empty without ``collect_importance``, which takes 8 % longer with a small model.
        """

    # Low-level, llama-style.
    def decode(
        self,
        tokens: Sequence[int],
        seq_ids: Sequence[int] | None = None,
        logits: Sequence[bool] | None = None,
    ) -> None:
        """Append tokens to their sequences (default: 0). `logits[i]`: keep that row's logits (default: last)."""
    def logits(self) -> NDArray[np.float32]:
        """Copy of the kept logits of the last `decode`, `[kept rows, n_vocab]`."""
    def _inject_fault(
        self, rank: int, at: int, *, hang_seconds: float = 0.0, stall_seconds: float | None = None
    ) -> None:
        """For tests: this rank throws, or hangs, at its `at`-th operation from now. stall_seconds: how long a rank may
        be silent from now on.
        """
    def close(self) -> None: ...
