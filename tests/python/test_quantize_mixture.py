"""Types that the quantiser chooses, against those of llama.cpp's (golden/quantize_types.npz, which its maker renews),
and the rules that the stored models do not reach.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyllama._engine import type_names, type_traits
from pyllama.errors import InvalidArgument, ModelError
from pyllama.quantize.file_types import FILE_TYPES, FileType, find_file_type, parse_tensor_type
from pyllama.quantize.mixture import (
    ModelTraits,
    TypeOptions,
    Weight,
    choose_types,
    fitting_type,
    is_converted,
    needs_importance,
)
from support.quantize_shapes import N_EMBD, ModelShape, all_shapes, key_values_of, tensors_of

GOLDEN = Path(__file__).parents[1] / "golden" / "quantize_types.npz"
REFUSED = 255


def file_type(name: str) -> FileType:
    found = find_file_type(name)
    assert found is not None
    return found


def sorted_weights(shape: ModelShape) -> list[Weight]:
    """In the order of processing: outside of blocks first, then block by block, names bytewise."""

    def position(weight: Weight) -> tuple[int, str]:
        parts = weight.name.split(".")
        return (int(parts[1]) if parts[0] == "blk" else -1, weight.name)

    return sorted((Weight(*spec) for spec in tensors_of(shape)), key=position)


def chosen(
    weights: list[Weight], traits: ModelTraits, name: str, options: TypeOptions | None = None, has_imatrix: bool = False
) -> list[str]:
    choices = choose_types(weights, traits, file_type(name), options or TypeOptions(), has_imatrix=has_imatrix)
    return [choice.type_name if choice else weight.type_name for weight, choice in zip(weights, choices, strict=True)]


@pytest.mark.parametrize("shape", all_shapes(), ids=lambda shape: shape.key)
def test_types_are_those_of_llama_cpp(shape: ModelShape) -> None:
    weights = sorted_weights(shape)
    traits = ModelTraits.of({entry.key: entry.value for entry in key_values_of(shape)})
    with np.load(GOLDEN) as golden:
        tables = golden[shape.key]
    assert tables.shape == (len(FILE_TYPES), 2, len(weights))
    for one, table in zip(FILE_TYPES, tables, strict=True):
        for has_imatrix, expected in zip((False, True), table, strict=True):
            if (expected == REFUSED).all():
                with pytest.raises(InvalidArgument, match="no fallback"):
                    chosen(weights, traits, one.name, has_imatrix=has_imatrix)
                continue
            found = chosen(weights, traits, one.name, has_imatrix=has_imatrix)
            wrong = [
                f"{weight.name}: {is_} for {type_names[should]}"
                for weight, is_, should in zip(weights, found, expected, strict=True)
                if is_ != type_names[should]
            ]
            assert not wrong, f"{one.name}, imatrix {has_imatrix}: {wrong[:5]}"


def test_golden_tables_cover_every_mixture() -> None:
    """A table that said the same for every file type would prove nothing."""
    with np.load(GOLDEN) as golden:
        table = golden[ModelShape(n_layer=32, queries_per_kv=4).key]
    patterns = {one.mixture: table[index].tobytes() for index, one in enumerate(FILE_TYPES)}
    # This model is F16 as COPY leaves it, and has no experts, which alone tell MXFP4_MOE from Q8_0.
    assert len(set(patterns.values())) == len(patterns) - 2


@pytest.mark.parametrize(
    ("name", "shape", "architecture", "expected"),
    [
        ("blk.0.attn_q.weight", (64, 64), "llama", True),
        ("blk.0.attn_q.bias", (64, 64), "llama", False),
        ("blk.0.attn_norm.weight", (64,), "llama", False),
        ("blk.0.attn_q_norm.weight", (64, 4), "llama", False),
        ("blk.0.flat.weight", (64, 1, 1), "llama", False),
        ("blk.0.ffn_gate_inp.weight", (64, 8), "llama", False),
        ("blk.0.ssm_conv1d.weight", (4, 64), "qwen35", False),
        ("blk.0.ssm_alpha.weight", (64, 16), "qwen35", True),
        ("blk.0.attn_gate.weight", (64, 64), "qwen35", True),
        ("position_embd.weight", (64, 100), "gpt2", False),
        ("token_types.weight", (64, 2), "bert", False),
        ("blk.0.time_mix_w1.weight", (64, 64), "rwkv6", False),
        ("blk.0.time_mix_key.weight", (64, 64), "rwkv6", True),
        ("v.patch_embd.weight", (14, 14, 3, 64), "clip", False),
        ("blk.0.indexer.proj.weight", (64, 64), "glm5-next", False),
        ("blk.0.indexer.proj.weight", (64, 64), "llama", True),
        ("per_layer_model_proj.weight", (64, 64), "gemma3n", False),
    ],
)
def test_which_tensors_are_converted(name: str, shape: tuple[int, ...], architecture: str, expected: bool) -> None:
    weight = Weight(name, "f16", shape)
    assert is_converted(weight, architecture, file_type("Q4_K_M"), TypeOptions()) is expected
    assert not is_converted(weight, architecture, file_type("COPY"), TypeOptions())


@pytest.mark.parametrize("type_name", ["i8", "i16", "i32", "i64", "f64"])
def test_integers_and_doubles_are_copied(type_name: str) -> None:
    assert not is_converted(Weight("a.weight", type_name, (64, 64)), "llama", file_type("F16"), TypeOptions())


@pytest.mark.parametrize(
    ("wanted", "columns", "expected"),
    [
        ("q4_K", 256, "q4_K"),
        ("q4_K", 4320, "q5_0"),
        ("q4_K", 4304, "f16"),
        ("q4_K", 100, "f16"),
        ("q4_K", 14, "f16"),
        ("q5_K", 96, "q5_1"),
        ("q6_K", 96, "q8_0"),
        ("q3_K", 96, "q4_0"),
        ("tq2_0", 96, "q4_0"),
        ("q2_0", 96, "q4_0"),
        ("q2_0", 64, "q2_0"),
        ("iq4_xs", 96, "iq4_nl"),
        ("iq1_m", 96, "iq4_nl"),
        ("q8_0", 100, "f16"),
        ("f32", 7, "f32"),
    ],
)
def test_rows_that_are_no_whole_blocks_take_another_type(wanted: str, columns: int, expected: str) -> None:
    found = fitting_type(Weight("a.weight", "f16", (columns, 8)), wanted)
    assert found == expected
    assert columns % type_traits[found].block_values == 0


def test_a_type_without_a_fallback_is_refused_with_the_tensor_named() -> None:
    with pytest.raises(InvalidArgument, match=r"a\.weight.*100.*q1_0"):
        fitting_type(Weight("a.weight", "f16", (100, 8)), "q1_0")


ATTENTION = Weight("blk.0.attn_v.weight", "f16", (N_EMBD, 8))
EMBEDDING = Weight("token_embd.weight", "f16", (N_EMBD, 8))
PER_LAYER = Weight("per_layer_token_embd.weight", "f16", (N_EMBD, 8))
OUTPUT = Weight("output.weight", "f16", (N_EMBD, 8))
LLAMA = ModelTraits("llama", n_layer=1, n_head=8, n_head_kv=8)


@pytest.mark.parametrize(
    ("weight", "name", "options", "expected"),
    [
        (ATTENTION, "Q4_K_M", TypeOptions(pure=True), "q4_K"),
        (OUTPUT, "Q4_K_M", TypeOptions(), "q6_K"),
        (OUTPUT, "Q4_K_M", TypeOptions(pure=True), "q4_K"),
        (OUTPUT, "Q4_K_M", TypeOptions(leave_output=True), "f16"),
        (OUTPUT, "Q4_K_M", TypeOptions(output_type="q8_0", tensor_types=[("output", "q5_0")]), "q8_0"),
        (OUTPUT, "Q4_K_M", TypeOptions(tensor_types=[("output", "q5_0")]), "q5_0"),
        (EMBEDDING, "Q4_K_M", TypeOptions(), "q4_K"),
        (EMBEDDING, "Q4_K_M", TypeOptions(embedding_type="q8_0", tensor_types=[("embd", "q5_0")]), "q8_0"),
        (PER_LAYER, "Q4_K_M", TypeOptions(embedding_type="q8_0", tensor_types=[("embd", "q5_0")]), "q5_0"),
        (PER_LAYER, "Q4_K_M", TypeOptions(embedding_type="q8_0"), "q8_0"),
        (EMBEDDING, "F16", TypeOptions(embedding_type="q8_0"), "q8_0"),
        (ATTENTION, "BF16", TypeOptions(tensor_types=[("attn", "q8_0")]), "bf16"),
        (ATTENTION, "Q4_0", TypeOptions(tensor_types=[("ATTN_[KV]", "q8_0"), ("attn", "q5_0")]), "q8_0"),
        (ATTENTION, "Q4_0", TypeOptions(pure=True, tensor_types=[("attn", "q5_0")]), "q5_0"),
        (ATTENTION, "Q4_0", TypeOptions(tensor_types=[("^attn", "q8_0")]), "q4_0"),
    ],
)
def test_wishes_about_types_have_their_order(weight: Weight, name: str, options: TypeOptions, expected: str) -> None:
    others = [other for other in (OUTPUT, EMBEDDING) if other != weight]
    assert chosen([weight, *others], LLAMA, name, options)[0] == expected


def test_a_forced_type_that_rows_do_not_fit_falls_back() -> None:
    odd = Weight("token_embd.weight", "f16", (100, 8))
    assert chosen([odd, OUTPUT], LLAMA, "Q8_0", TypeOptions(embedding_type="q4_K"))[0] == "f16"


def test_a_bad_pattern_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"attn\("):
        chosen([ATTENTION], LLAMA, "Q4_0", TypeOptions(tensor_types=[("attn(", "q8_0")]))


def test_a_feed_forward_tensor_of_no_layer_is_refused() -> None:
    experts = ModelTraits("llama", n_layer=2, n_head=8, n_head_kv=8, n_expert=8)
    with pytest.raises(InvalidArgument, match=r"blk\.2\.ffn_down_exps"):
        chosen([Weight("blk.2.ffn_down_exps.weight", "f16", (N_EMBD, 2, 8))], experts, "Q4_K_M")


@pytest.mark.parametrize(
    ("name", "type_name", "mixture", "expected"),
    [
        ("blk.0.ffn_up.weight", "iq2_xxs", "IQ2_XXS", True),
        ("blk.0.ffn_up.weight", "iq3_xxs", "IQ3_XS", True),
        ("blk.0.ffn_up.weight", "iq3_s", "IQ3_S", False),
        ("blk.0.ffn_up.weight", "q2_K", "Q2_K_S", True),
        ("blk.0.ffn_up.weight", "q2_K", "Q2_K", False),
        ("token_embd.weight", "q2_K", "Q2_K_S", False),
        ("output.weight", "iq2_s", "IQ2_M", False),
    ],
)
def test_which_types_need_an_imatrix(name: str, type_name: str, mixture: str, expected: bool) -> None:
    assert needs_importance(name, type_name, file_type(mixture)) is expected


def test_hyperparameters_may_be_arrays_over_layers() -> None:
    traits = ModelTraits.of(
        {
            "general.architecture": "qwen35",
            "qwen35.block_count": 4,
            "qwen35.attention.head_count": np.asarray([8, 8, 8, 8], np.int32),
            "qwen35.attention.head_count_kv": np.asarray([0, 2, 0, 2], np.int32),
        }
    )
    assert traits == ModelTraits("qwen35", 4, 8, 0, 0)
    assert traits.queries_per_kv == 0


@pytest.mark.parametrize("value", ["12", 1.5, np.asarray([], np.int32), ["a"]])
def test_hyperparameters_of_another_type_are_refused(value: object) -> None:
    with pytest.raises(ModelError, match=r"llama\.block_count"):
        ModelTraits.of({"general.architecture": "llama", "llama.block_count": value})


@pytest.mark.parametrize(
    ("text", "name", "mixture"),
    [("q4_k_m", "Q4_K_M", "Q4_K_M"), ("15", "Q4_K", "Q4_K_M"), ("Q3_k", "Q3_K", "Q3_K_M"), ("2", "Q4_0", "Q4_0"),
     ("0", "F32", "F32"), ("copy", "COPY", "COPY"), ("38", "MXFP4_MOE", "MXFP4_MOE")],
)  # fmt: skip
def test_file_types_by_name_and_number(text: str, name: str, mixture: str) -> None:
    assert (file_type(text).name, file_type(text).mixture) == (name, mixture)


@pytest.mark.parametrize("text", ["", "4", "None", "39", "-1", "q4", "model.gguf"])
def test_other_words_are_no_file_type(text: str) -> None:
    assert find_file_type(text) is None


def test_tensor_types_in_any_case() -> None:
    assert parse_tensor_type("Q4_k") == "q4_K"
    for name in ("i32", "q8_K", "q8_1", "zz"):
        with pytest.raises(InvalidArgument, match=name):
            parse_tensor_type(name)
