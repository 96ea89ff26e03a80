"""Which tensors a file type converts, and to what: the mixture rules of the format's quantiser as tables.

Pure functions of names, shapes and a few hyperparameters. `choose_types` goes through the tensors of a model once, in
the order they are processed: some rules count the tensors of a kind seen so far.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyllama.errors import InvalidArgument, ModelError
from pyllama.gguf import type_traits

from .file_types import CONVERTIBLE, FileType

# A name that contains one of these stays as it is: norms, routers, small or sensitive matrices, other modalities.
_KEPT_PARTS = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "attn_rel_b.weight",
    "time_mix_first.weight", *(f"time_mix_{part}.weight" for part in ("w0", "w1", "w2", "v0", "v1", "v2")),
    *(f"time_mix_{part}.weight" for part in ("a0", "a1", "a2", "g1", "g2")),
    "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger",
    "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
_KEPT_NAMES = frozenset({"position_embd.weight", "token_types.weight"})
_KEPT_PARTS_OF_ARCHITECTURE = {
    "glm5-next": (
        "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate",
        "indexer_compressor_ape", *(f"ssm_{part}.weight" for part in ("f_a", "f_b", "g_a", "g_b", "beta")),
        "attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_v_b.weight",
    ),
}  # fmt: skip

# Types whose rows may not divide into blocks -> the type that takes their place.
_FALLBACKS = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q2_0", "q2_K", "q3_K", "tq1_0", "tq2_0"), "q4_0"),
    "q4_K": "q5_0",
    "q5_K": "q5_1",
    "q6_K": "q8_0",
}
_NEED_IMPORTANCE = frozenset({"iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_m", "iq1_s"})
_TINY = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M"})  # the file types of `_tiny_mixture`


class Category(Enum):
    OUTPUT = auto()
    EMBEDDING = auto()
    V = auto()  # also fused QKV and the joint K/V projection of latent attention
    K = auto()
    Q = auto()
    ATTENTION_OUTPUT = auto()
    UP = auto()
    GATE = auto()
    DOWN = auto()
    OTHER = auto()


_CATEGORY_PARTS = (
    ("attn_qkv.weight", Category.V), ("attn_kv_b.weight", Category.V), ("attn_v.weight", Category.V),
    ("attn_k.weight", Category.K), ("attn_q.weight", Category.Q), ("attn_output.weight", Category.ATTENTION_OUTPUT),
    ("ffn_up", Category.UP), ("ffn_gate", Category.GATE), ("ffn_down", Category.DOWN),
)  # fmt: skip
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")


@cache
def category_of(name: str) -> Category:
    if name == "output.weight":
        return Category.OUTPUT
    if name in _EMBEDDINGS:
        return Category.EMBEDDING
    return next((category for part, category in _CATEGORY_PARTS if part in name), Category.OTHER)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the rules ask about a model."""

    architecture: str
    n_layer: int = 0  # with the layers that predict further tokens
    n_head: int = 0  # of the first layer
    n_head_kv: int = 0  # of the first layer; 0 where it has no softmax attention
    n_expert: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "ModelTraits":
        """Raises `ModelError` for a key of another type."""
        architecture = str(metadata.get("general.architecture", ""))

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{architecture}.{key}", default)
            if isinstance(value, np.ndarray) and value.size:  # one number per layer
                value = value[0]
            if not isinstance(value, int | np.integer):
                raise ModelError(f"{architecture}.{key} is {value!r:.50}, expected a number or one per layer")
            return int(value)

        n_head = number("attention.head_count")
        return cls(
            architecture,
            number("block_count"),
            n_head,
            number("attention.head_count_kv", n_head),
            number("expert_count"),
        )

    @property
    def queries_per_kv(self) -> int:
        return self.n_head // self.n_head_kv if self.n_head_kv else 0


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """The user's wishes about types."""

    pure: bool = False  # no mixture: the file type's default wherever nothing else is asked for
    leave_output: bool = False
    output_type: str | None = None
    embedding_type: str | None = None
    tensor_types: Sequence[tuple[str, str]] = ()  # (regular expression searched in the name, type); the first counts


class Weight(NamedTuple):
    name: str
    type_name: str
    shape: tuple[int, ...]  # ggml order


class Choice(NamedTuple):
    type_name: str
    wanted: str  # before the fallback for rows that are not whole blocks

    @property
    def is_fallback(self) -> bool:
        return self.type_name != self.wanted


def is_converted(weight: Weight, architecture: str, file_type: FileType, options: TypeOptions) -> bool:
    name = weight.name
    n_dims = max((index + 1 for index, size in enumerate(weight.shape) if size > 1), default=0)
    return (
        bool(file_type.default)
        and weight.type_name in CONVERTIBLE
        and n_dims >= 2
        and not (options.leave_output and name == "output.weight")
        and _has_convertible_name(name, architecture)
    )


@cache
def _has_convertible_name(name: str, architecture: str) -> bool:
    kept_parts = (*_KEPT_PARTS, *_KEPT_PARTS_OF_ARCHITECTURE.get(architecture, ()))
    return name.endswith("weight") and name not in _KEPT_NAMES and not any(part in name for part in kept_parts)


def needs_importance(name: str, type_name: str, file_type: FileType) -> bool:
    """Without importance weights this type is too poor for that tensor."""
    if name in ("token_embd.weight", "output.weight"):
        return False
    return type_name in _NEED_IMPORTANCE or (type_name == "q2_K" and file_type.mixture == "Q2_K_S")


def choose_types(
    weights: Sequence[Weight], traits: ModelTraits, file_type: FileType, options: TypeOptions, *, has_imatrix: bool
) -> list[Choice | None]:
    """The type of each weight, given in the order of processing; None where it is copied.

    Raises `InvalidArgument` for rows that fit neither the type nor any fallback.
    """
    patterns = [(_compiled(pattern), type_name) for pattern, type_name in options.tensor_types]
    mixture = _Mixture(weights, traits, file_type, options, has_imatrix)

    def wanted(weight: Weight) -> str:
        category = category_of(weight.name)
        by_pattern = next((type_name for pattern, type_name in patterns if pattern.search(weight.name)), None)
        if category is Category.EMBEDDING and options.embedding_type is not None:  # a pattern spares the per-layer one
            is_replaced = weight.name != "token_embd.weight" and by_pattern is not None
            if not is_replaced:
                return options.embedding_type
        if category is Category.OUTPUT and options.output_type is not None:
            return options.output_type
        if file_type.default in ("f32", "f16", "bf16"):
            return file_type.default
        if by_pattern is not None:
            return by_pattern
        return file_type.default if options.pure else mixture.type_of(weight, category)

    choices: list[Choice | None] = []
    for weight in weights:
        if is_converted(weight, traits.architecture, file_type, options):
            type_name = wanted(weight)
            choices.append(Choice(fitting_type(weight, type_name), type_name))
        else:
            choices.append(None)
    return choices


def fitting_type(weight: Weight, type_name: str) -> str:
    """`type_name` where the rows are whole blocks of it, else its fallback, at last f16."""
    columns = weight.shape[0]

    def fits(name: str) -> bool:
        return columns % type_traits[name].block_values == 0

    if fits(type_name):
        return type_name
    if type_name not in _FALLBACKS and type_traits[type_name].block_values > 32:
        raise InvalidArgument(
            f"tensor '{weight.name}': rows of {columns} values are not whole blocks of "
            f"{type_traits[type_name].block_values} as {type_name} needs, and there is no fallback for it"
        )
    fallback = _FALLBACKS.get(type_name, type_name)
    return fallback if fits(fallback) else "f16"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.lower())
    except re.error as error:
        raise InvalidArgument(f"'{pattern}' is not a regular expression: {error}") from None


class _Mixture:
    """The rules of a file type, with the counts of the tensors seen so far."""

    def __init__(
        self,
        weights: Sequence[Weight],
        traits: ModelTraits,
        file_type: FileType,
        options: TypeOptions,
        has_imatrix: bool,
    ) -> None:
        self._traits = traits
        self._file_type = file_type
        self._output_type = options.output_type
        self._has_imatrix = has_imatrix
        self._is_tied = all(weight.name != "output.weight" for weight in weights)
        self._n_v = sum(category_of(weight.name) is Category.V for weight in weights)
        self._seen = dict.fromkeys(Category, 0)

    def type_of(self, weight: Weight, category: Category) -> str:
        position = self._position(weight.name, category)
        name, default = self._file_type.mixture, self._file_type.default
        if self._traits.architecture == "glm5-next" and re.search(r"attn_q_[ab]|nextn\.eh_proj", weight.name):
            return "q8_0"
        if category is Category.OUTPUT or (category is Category.EMBEDDING and self._is_tied):
            return self._output_layer(weight)
        if name == "MXFP4_MOE":
            return self._experts_mxfp4(weight, category)
        if category is Category.EMBEDDING:
            return _EMBEDDING_TYPES.get(name, default)
        if name in _TINY:
            return self._tiny_mixture(category, position) or default
        rule = _RULES.get(category)
        return (rule(self, position) if rule else None) or default

    def _position(self, name: str, category: Category) -> int:
        """How many of its kind came before; of mixtures of experts, the layer of feed-forward tensors."""
        if self._traits.n_expert > 1 and category in (Category.UP, Category.GATE, Category.DOWN):
            match = re.match(r"blk\.(\d+)\.", name)
            if match is None or int(match[1]) >= self._traits.n_layer:
                raise InvalidArgument(f"tensor '{name}' is in no layer of {self._traits.n_layer}")
            return int(match[1])
        self._seen[category] += 1
        return self._seen[category] - 1

    def _output_layer(self, weight: Weight) -> str:
        name, default = self._file_type.mixture, self._file_type.default
        if self._output_type is not None:
            return self._output_type
        if name == "MXFP4_MOE" or default == "q8_0":
            return "q8_0"
        if self._traits.architecture == "falcon" or weight.shape[0] % type_traits[default].block_values:
            return "q8_0"
        return "q5_K" if name in _TINY or name == "IQ3_XXS" else "q6_K"

    def _experts_mxfp4(self, weight: Weight, category: Category) -> str:
        is_stack = len(weight.shape) > 2 and weight.shape[2] > 1
        if self._traits.architecture == "bailingmoe3":
            is_stack = is_stack and category in (Category.UP, Category.GATE, Category.DOWN)
        return "mxfp4" if is_stack else "q8_0"

    def _tiny_mixture(self, category: Category, position: int) -> str | None:
        """Mixtures of about two bits per weight."""
        name, traits = self._file_type.mixture, self._traits
        is_larger = name in ("IQ2_S", "IQ2_M")
        match category:
            case Category.V:
                if traits.queries_per_kv >= 4 or traits.n_expert >= 4:
                    return "q4_K"
                return "iq3_s" if is_larger else "q2_K"
            case Category.K:
                return "q4_K" if traits.n_expert == 8 else None
            case Category.DOWN if position < traits.n_layer // 8:
                return "iq3_s" if is_larger else "q2_K"
            case Category.ATTENTION_OUTPUT:
                if traits.n_expert == 8:
                    return "q5_K"
                return {"IQ1_S": "iq2_xxs", "IQ1_M": "iq2_xxs", "IQ2_S": "iq3_s", "IQ2_M": "iq3_s"}.get(name)
        return None

    def _v(self, i: int) -> str | None:
        traits = self._traits
        many_queries = traits.queries_per_kv >= 4
        chosen: str | None = None
        match self._file_type.mixture:
            case "Q2_K":
                chosen = "q4_K" if many_queries else "q3_K"
            case "IQ3_XXS":
                chosen = "q4_K" if many_queries else "iq3_xxs" if self._has_imatrix else "iq3_s"
            case "Q2_K_S" | "IQ3_XS" | "IQ3_S" if many_queries:
                chosen = "q4_K"
            case "IQ3_M":
                chosen = "q4_K"
            case "Q3_K_M":
                chosen = "q5_K" if i < 2 else "q4_K"
            case "Q3_K_L":
                chosen = "q5_K"
            case "IQ4_NL" | "IQ4_XS" if many_queries:
                chosen = "q5_K"
            case "Q4_K_M" | "Q5_K_M" if _gets_more_bits(i, self._n_v):
                chosen = "q6_K"
            case "Q4_K_S" if i < 4:
                chosen = "q5_K"
        is_70b = traits.architecture == "llama" and traits.n_layer == 80 and traits.n_head != traits.n_head_kv
        if is_70b and (chosen or self._file_type.default) in ("q3_K", "q4_K"):
            chosen = "q5_K"  # eight queries share a V head there: more bits cost little
        return "q8_0" if traits.n_expert == 8 else chosen

    def _k(self, _: int) -> str | None:
        return "q8_0" if self._traits.n_expert == 8 else self._q(0)

    def _q(self, _: int) -> str | None:
        return {"IQ3_XS": "iq3_xxs", "IQ3_XXS": "iq2_s"}.get(self._file_type.mixture)

    def _down(self, i: int) -> str | None:
        n, is_falcon = self._traits.n_layer, self._traits.architecture == "falcon"
        is_early, is_more = i < n // 8, _gets_more_bits(i, n)
        match self._file_type.mixture:
            case "Q2_K":
                return "q3_K"
            case "Q2_K_S" if is_early:
                return "q4_K"
            case "IQ3_XXS" if not self._has_imatrix:
                return "q4_K" if is_early else "q3_K"
            case "Q3_K_M":
                return "q5_K" if i < n // 16 else "q4_K" if not is_falcon or is_more else "q3_K"
            case "IQ3_M" if is_early or (self._traits.n_expert == 8 and is_more):
                return "q4_K"
            case "Q3_K_L":
                return "q4_K" if is_falcon else "q5_K"
            case "Q4_K_M" if is_falcon:
                return "q6_K" if i < n // 16 else "q5_K" if is_more else "q4_K"
            case "Q4_K_M" | "Q5_K_M" if is_more:
                return "q6_K"
            case "IQ4_NL" | "IQ4_XS" if is_early and not self._has_imatrix:
                return "q5_K"
            case "Q4_K_S" if is_early and not is_falcon:
                return "q5_K"
            case "Q4_0" | "Q5_0" if is_early and self._has_imatrix:
                return {"Q4_0": "q4_1", "Q5_0": "q5_1"}[self._file_type.mixture]
        return None

    def _attention_output(self, _: int) -> str | None:
        name = self._file_type.mixture
        if self._traits.architecture == "falcon":
            return "q4_K" if name == "Q3_K_L" else None
        if self._traits.n_expert == 8:
            return "q5_K" if name in _OUTPUT_Q5_WITH_EXPERTS else None
        return {"Q2_K": "q3_K", "IQ3_XXS": "iq3_s", "Q3_K_M": "q4_K", "Q3_K_L": "q5_K", "IQ3_M": "q4_K"}.get(name)

    def _gate_or_up(self, i: int) -> str | None:
        n = self._traits.n_layer
        return "iq3_xxs" if self._file_type.mixture == "IQ3_XS" and n // 8 <= i < 7 * n // 8 else None


_RULES = {
    Category.V: _Mixture._v,
    Category.K: _Mixture._k,
    Category.Q: _Mixture._q,
    Category.DOWN: _Mixture._down,
    Category.ATTENTION_OUTPUT: _Mixture._attention_output,
    Category.GATE: _Mixture._gate_or_up,
    Category.UP: _Mixture._gate_or_up,
}
_EMBEDDING_TYPES = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"), "q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "iq3_s"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "q4_K"),
}
_OUTPUT_Q5_WITH_EXPERTS = frozenset(
    ("Q2_K", "IQ3_XS", "IQ3_XXS", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ3_S", "IQ3_M", "IQ4_XS")
)


def _gets_more_bits(i: int, n: int) -> bool:
    """The first and the last eighth, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
