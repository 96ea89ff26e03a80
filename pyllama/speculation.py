"""Speculative decoding as users ask for it: which drafters, with which draft model; opened beside an engine.

The drafters themselves are the engine's (`pyllama._engine.Speculator`); what they draft never changes a text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyllama.draft_placement import DraftToPlace, PlacedDraft, placement_without_effect
from pyllama.errors import InvalidArgument, PyllamaError
from pyllama.options import draft_placement

log = logging.getLogger("pyllama")

MOST_ROWS = 64
"""Rows that all drafts of a step may take together: up to there the engine runs as for single tokens."""

COMPANIONS = ("draft-eagle3", "draft-dflash", "draft-dspark")
"""Types whose drafter is made for the target and loaded with it."""

COMPUTING = ("draft-simple", "draft-mtp", *COMPANIONS)
"""Types that draft with a model; the others look things up."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Everything behind the `--spec-*` options. types: as in `--spec-type`; none of them, or "none": no speculation.

    draft_model: path of a GGUF file, or "". n_max, n_min, p_min: of drafts that are computed. samples: draw these
    drafts and verify by rejection sampling; the text then has the distribution of the model, but not the random numbers
    of an undrafted run; None: DFlash2 does. The n-gram tuples: sizes n and m (and fewest hits); for ngram_mod n_match,
    n_min, n_max.
    adaptive: verify only as much as pays, in the server; `Llama` verifies every draft whole.
    synthetic_length, synthetic_rates: for benchmarks, see `synthetic_rates_of`.
    type_k, type_v, n_threads, n_threads_batch: of the draft model; placement: as arguments of `pyllama._engine.Model`,
    of which devices, device_layers and tensor_overrides may be given; see `placed`.
    infers_type: the draft model's file says the type, see `resolved`.
    """

    types: tuple[str, ...] = ()
    draft_model: str = ""
    infers_type: bool = False
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    samples: bool | None = None
    ngram_simple: tuple[int, int] = (12, 48)
    ngram_map_k: tuple[int, int, int] = (12, 48, 1)
    ngram_map_k4v: tuple[int, int, int] = (12, 48, 1)
    ngram_mod: tuple[int, int, int] = (24, 48, 64)
    lookup_static: str = ""
    lookup_dynamic: str = ""
    adaptive: bool = True
    synthetic_length: float = -1.0
    synthetic_rates: tuple[float, ...] = ()
    type_k: str = "f16"
    type_v: str = "f16"
    n_threads: int = 0
    n_threads_batch: int = 0
    placement: Mapping[str, Any] = field(default_factory=dict)

    def placed(self, draft: PlacedDraft | None) -> SpeculationOptions:
        """With the draft model where a place was found for it (`pyllama.placement.place_model`)."""
        return self if draft is None else replace(self, placement=draft.arguments)

    def placement_warnings(self, devices: Sequence[str]) -> tuple[str, ...]:
        """About a drafter that is part of the model, which lies on `devices`, and was to lie elsewhere."""
        if not self.is_on or not self.placement or not {"draft-mtp", *COMPANIONS}.intersection(self.types):
            return ()
        if "draft-simple" in self.types:  # it is what was meant
            return ()
        warning = placement_without_effect(self.placement, devices)
        return (warning,) if warning else ()

    def draft_to_place(self, sizes: Mapping[str, Any]) -> DraftToPlace | None:
        """For `pyllama.placement.place_model`. sizes: of the engine of the model."""
        if not self.is_on or "draft-simple" not in self.types or not Path(self.draft_model).is_file():
            return None
        own = {"type_k": self.type_k, "type_v": self.type_v, "swa_full": True}
        return DraftToPlace(self.draft_model, self.placement, {**sizes, **own})

    def resolved(self) -> SpeculationOptions:
        """The same with the type that the draft model's file says. Raises what opening the file raises."""
        if not self.infers_type:
            return self
        inferred = tuple(name for name in inferred_types(self.draft_model) if name not in self.types)
        return replace(self, types=(*inferred, *self.types), infers_type=False)

    @property
    def is_on(self) -> bool:
        return bool(self.types) and "none" not in self.types

    @property
    def draws(self) -> bool:
        """Drafts are drawn at the request's temperature. DFlash2 drafters are made for that; others by wish."""
        return "draft-dflash" in self.types if self.samples is None else self.samples

    @property
    def model_arguments(self) -> dict[str, Any]:
        """What the target is to be loaded with: arguments of `pyllama._engine.Model`. Raises `InvalidArgument`."""
        if not self.is_on:
            return {}
        with_file = [name for name in ("draft-simple", *COMPANIONS) if name in self.types]
        predicts = "draft-mtp" in self.types
        if predicts and "draft-eagle3" in self.types:
            raise InvalidArgument("draft-mtp and draft-eagle3 cannot both go on from the model's hidden states")
        if len(with_file) > 1:
            raise InvalidArgument(f"{' and '.join(with_file)} need a draft model each; there is one option for it")
        arguments: dict[str, Any] = {"load_mtp": predicts}
        if with_file and with_file[0] in COMPANIONS:
            if not self.draft_model:
                raise InvalidArgument(f"{with_file[0]} needs a drafter (--spec-draft-model)")
            arguments["drafter"] = self._existing_file()
        if predicts and self.draft_model and not with_file:
            arguments["mtp_file"] = self._existing_file()
        return arguments

    def _existing_file(self) -> str:
        if not Path(self.draft_model).is_file():
            raise InvalidArgument(f"the draft model: there is no file {self.draft_model!r}")
        return self.draft_model

    @property
    def is_synthetic(self) -> bool:
        return self.synthetic_length > 0 or bool(self.synthetic_rates)


def speculation_from_options(options: Any, draft_model: str = "") -> SpeculationOptions:
    """Of parsed options: llama-server's, llama-cli's, llama-bench's. draft_model: the local file they mean, if any."""
    types = () if "none" in options.spec_type else tuple(dict.fromkeys(options.spec_type))
    mod = (options.spec_ngram_mod_n_match, options.spec_ngram_mod_n_min, options.spec_ngram_mod_n_max)
    if options.spec_default:
        types, mod = tuple(dict.fromkeys((*types, "ngram-mod"))), (24, 48, 64)
    return SpeculationOptions(
        types=types,
        draft_model=draft_model,
        infers_type=bool(draft_model) and not options.given("spec_type"),
        n_max=options.spec_draft_n_max,
        n_min=options.spec_draft_n_min,
        p_min=options.spec_draft_p_min,
        samples=options.spec_draft_sampling == "probabilistic" if options.given("spec_draft_sampling") else None,
        ngram_simple=(options.spec_ngram_simple_size_n, options.spec_ngram_simple_size_m),
        ngram_map_k=(
            options.spec_ngram_map_k_size_n,
            options.spec_ngram_map_k_size_m,
            options.spec_ngram_map_k_min_hits,
        ),
        ngram_map_k4v=(
            options.spec_ngram_map_k4v_size_n,
            options.spec_ngram_map_k4v_size_m,
            options.spec_ngram_map_k4v_min_hits,
        ),
        ngram_mod=mod,
        lookup_static=options.values.get("lookup_cache_static", ""),  # llama-cli has neither
        lookup_dynamic=options.values.get("lookup_cache_dynamic", ""),
        adaptive=options.values.get("spec_adaptive", False),  # llama-bench verifies every draft whole
        synthetic_length=options.spec_synth_len,
        synthetic_rates=tuple(options.spec_synth_rates),
        type_k=options.spec_draft_type_k,
        type_v=options.spec_draft_type_v,
        n_threads=max(0, options.spec_draft_threads or 0),
        n_threads_batch=max(0, options.spec_draft_threads_batch or 0),
        placement=draft_placement(options),
    )


def inferred_types(draft_model: str) -> tuple[str, ...]:
    """What the header of a draft file says it is for; nothing when it could be any model."""
    from pyllama._engine import GgufFile

    if not Path(draft_model).is_file():
        raise InvalidArgument(f"the draft model: there is no file {draft_model!r}")
    with contextlib.closing(GgufFile(draft_model, metadata_only=True, single_file=True)) as file:
        architecture = str(file.metadata.get("general.architecture", ""))
        n_blocks = file.metadata.get(f"{architecture}.block_count", 0)
        tensors = {tensor.name for tensor in file.tensors}
    if architecture == "eagle3":
        return ("draft-eagle3",)
    if architecture == "dflash":
        return ("draft-dspark",) if "markov_w1.weight" in tensors else ("draft-dflash",)
    if isinstance(n_blocks, int) and f"blk.{n_blocks - 1}.nextn.eh_proj.weight" in tensors:
        return ("draft-mtp",)
    return ()


def check_vocabularies(target: Mapping[str, Any], draft: Mapping[str, Any]) -> None:
    """Raises `InvalidArgument` unless a draft model with the metadata `draft` speaks the target's tokens."""

    def refuse(what: str, target_value: object, draft_value: object) -> None:
        raise InvalidArgument(
            f"the draft model's vocabulary does not fit: {what} is {draft_value!r}, the model has {target_value!r}"
        )

    for what, key in (("the tokenizer", "tokenizer.ggml.model"),):
        if target.get(key) != draft.get(key):
            refuse(what, target.get(key), draft.get(key))
    for name in ("bos", "eos"):
        adds = [bool(metadata.get(f"tokenizer.ggml.add_{name}_token", False)) for metadata in (target, draft)]
        ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for metadata in (target, draft)]
        if adds[0] != adds[1]:
            refuse(f"add_{name}_token", *adds)
        if adds[0] and ids[0] != ids[1]:
            refuse(f"{name}_token_id", *ids)
    texts = [metadata.get("tokenizer.ggml.tokens") or [] for metadata in (target, draft)]
    sizes = [len(tokens) for tokens in texts]
    if abs(sizes[0] - sizes[1]) > 128:
        refuse("the number of tokens", *sizes)
    for token in range(5, min(sizes)):
        if texts[0][token] != texts[1][token]:
            refuse(f"token {token}", texts[0][token], texts[1][token])


def synthetic_rates_of(options: SpeculationOptions, n_max: int) -> tuple[float, ...]:
    """For each place of a draft the probability that its token stands, given those before. Raises `InvalidArgument`.

    synthetic_rates say it for all tokens up to the place together; synthetic_length is the mean of the tokens that a
    round then gives, the model's own included.
    """
    if options.synthetic_length > 0 and options.synthetic_rates:
        raise InvalidArgument("--spec-synth-len and --spec-synth-rates exclude each other")
    if options.synthetic_rates:
        rates = options.synthetic_rates
        if len(rates) != n_max:
            raise InvalidArgument(
                f"--spec-synth-rates has {len(rates)} rates, expected {n_max}: one for each drafted token"
            )
        if any(not 0.0 <= rate <= 1.0 for rate in rates) or any(a < b for a, b in pairwise(rates)):
            raise InvalidArgument("--spec-synth-rates must fall from at most 1 to at least 0")
        before = (1.0, *rates[:-1])
        return tuple(rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True))
    length = options.synthetic_length
    if not 1.0 <= length <= n_max + 1:
        raise InvalidArgument(f"--spec-synth-len is {length:g}, expected 1 to {n_max + 1}")
    low, high = 0.0, 1.0
    for _ in range(32):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, n_max + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return (high,) * n_max


class Speculation:
    """A speculator beside an engine, which its owner closes, with the draft model's engine if it needs one."""

    def __init__(self, speculator: Any, draft_engine: Any = None, synthetic_rates: Sequence[float] = ()) -> None:
        self.speculator = speculator
        self.names: list[str] = speculator.names
        self.longest: int = speculator.longest
        self.synthetic_rates = tuple(synthetic_rates)
        self._draft_engine = draft_engine

    @property
    def computes(self) -> bool:
        """Some drafter computes: it costs even where it finds nothing."""
        return any(name in COMPUTING for name in self.names)

    def close(self) -> None:
        try:
            self.speculator.save()
        except PyllamaError as error:
            log.error("%s", error)
        self.speculator.close()
        if self._draft_engine is not None:
            self._draft_engine.close()


def open_speculation(
    options: SpeculationOptions,
    engine: Any,
    metadata: Mapping[str, Any],
    *,
    engine_arguments: Mapping[str, Any],
) -> Speculation | None:
    """Drafters for `engine`, the target, whose model has `metadata`; None when none are wanted.

    engine_arguments: of the target's engine (`pyllama._engine.Engine`), which the draft model's follows.
    Raises `PyllamaError` or `OSError`.
    """
    if not options.is_on:
        return None
    from pyllama._engine import Engine, Model, Speculator

    draft_engine = None
    with contextlib.ExitStack() as on_error:
        if "draft-simple" in options.types:
            if not options.draft_model:
                raise InvalidArgument("draft-simple needs a draft model (--spec-draft-model)")
            if not Path(options.draft_model).is_file():
                raise InvalidArgument(f"the draft model: there is no file {options.draft_model!r}")
            n_threads = options.n_threads or engine_arguments.get("n_threads", 0)
            with contextlib.closing(Model(options.draft_model, n_threads=n_threads, **options.placement)) as model:
                check_vocabularies(metadata, model.metadata)
                arguments = dict(engine_arguments)
                arguments |= {
                    "n_ctx": engine.n_ctx,
                    "n_seq_max": engine.n_seq_max * (2 if model.is_recurrent else 1),
                    "n_threads": n_threads,
                    "n_threads_batch": options.n_threads_batch
                    or options.n_threads
                    or arguments.get("n_threads_batch", 0),
                    "type_k": options.type_k,
                    "type_v": options.type_v,
                    "cache_bytes": 0,
                    "n_checkpoints": 0,
                    "swa_full": True,  # drafts are cut back
                }
                for key in [key for key in arguments if key.startswith(("rope_", "yarn_"))]:
                    del arguments[key]  # those are the target's
                draft_engine = Engine(model, **arguments)
                on_error.callback(draft_engine.close)
        speculator = Speculator(
            engine,
            options.types,
            draft=draft_engine,
            draft_n_max=options.n_max,
            draft_n_min=options.n_min,
            draft_p_min=options.p_min,
            draft_samples=options.draws,
            ngram_simple=options.ngram_simple,
            ngram_map_k=options.ngram_map_k,
            ngram_map_k4v=options.ngram_map_k4v,
            ngram_mod=options.ngram_mod,
            lookup_static=options.lookup_static,
            lookup_dynamic=options.lookup_dynamic,
        )
        on_error.callback(speculator.close)
        if speculator.longest < options.n_max and {"draft-dflash", "draft-dspark"}.intersection(options.types):
            log.warning("drafts have at most %d tokens, a block of the drafter", speculator.longest)
        rates = synthetic_rates_of(options, speculator.longest) if options.is_synthetic else ()
        on_error.pop_all()
    return Speculation(speculator, draft_engine, rates)
