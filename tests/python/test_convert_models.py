"""Converted checkpoints of every family: the values of each tensor, and logits against those of transformers.

Golden logits were computed from the same folders by `tests/golden/convert/make_logits.py`. The files are run by our
engine and, for a variant of each family, by llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from bench.llama_cpp_peer import LlamaCppPeer, peer_is_installed
from pyllama._engine import Engine, GgufFile, Model, dequantize
from pyllama.tools.convert_hf_to_gguf import main
from support import checkpoints
from support.checkpoints import CONFIGS, golden_columns, golden_tokens, write_checkpoint
from support.converted_tensors import expected_tensors
from support.hybrid_checkpoints import HYBRID_CONFIGS, text_config
from support.logits import kl_divergence, log_softmax, position_logits
from support.qwen35_forward import Qwen35Forward

GOLDEN = Path(__file__).parent.parent / "golden" / "convert" / "logits.npz"
PEER_RUNS = (
    *("gemma3", "gemma3-capped", "llama-llama3", "mixtral", "qwen2-tied-yarn", "qwen3", "qwen3moe"),
    *("qwen35", "qwen35-wide-heads", "qwen35-multimodal-tied", "qwen35moe", "qwen4exp", "qwen4exp-multimodal-plain"),
)
EVERYWHERE = slice(None)
ROUTERS_AND_CONVOLUTIONS = ("ffn_gate_inp.weight", "ssm_conv1d.weight")
# With F32 weights and KV the engine measures 2e-12. llama.cpp keeps K and V in F16: 3e-6.
MAX_KL_F32 = 1e-10
MAX_DISTANCE = 1e-4  # measured: 3e-5
MAX_KL_F16_KV = 2e-5


def convert(folder: Path, *arguments: str, outtype: str = "f32") -> Path:
    path = folder / "out.gguf"
    assert main([str(folder), "--outtype", outtype, "--outfile", str(path), *arguments]) == 0
    return path


def kl_to_golden(variant: str, logits: NDArray[np.float32], positions: slice = EVERYWHERE) -> float:
    """Mean over the positions, and over the tokens of which golden logits are kept."""
    with np.load(GOLDEN) as goldens:
        golden = log_softmax(goldens[variant][positions])
    ids = np.tile(np.arange(golden.shape[1]), (len(golden), 1))
    return float(kl_divergence(ids, golden, logits[:, golden_columns(CONFIGS[variant])]).mean())


def distance_to_golden(variant: str, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Relative to the golden logits' length, at each position."""
    with np.load(GOLDEN) as goldens:
        golden = goldens[variant].astype(np.float64)
    difference = logits[:, golden_columns(CONFIGS[variant])] - golden
    return np.linalg.norm(difference, axis=1) / np.linalg.norm(golden, axis=1)


@contextmanager
def opened(path: Path) -> Iterator[Engine]:
    model = Model(path)
    engine = Engine(model, n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    yield engine
    engine.close()
    model.close()


def engine_logits(path: Path) -> NDArray[np.float32]:
    with opened(path) as engine:
        return position_logits(engine, golden_tokens())


@pytest.mark.parametrize("variant", CONFIGS)
def test_engine_computes_the_logits_of_transformers_however_the_prompt_is_cut(tmp_path: Path, variant: str) -> None:
    path = convert(write_checkpoint(tmp_path, CONFIGS[variant]))
    tokens = golden_tokens(CONFIGS[variant])
    with opened(path) as engine:
        for chunk in (None, 7, 1):
            logits = position_logits(engine, tokens, chunk=chunk)
            assert distance_to_golden(variant, logits).max() < MAX_DISTANCE, f"chunks of {chunk}"
            assert kl_to_golden(variant, logits) < MAX_KL_F32, f"chunks of {chunk}"


@pytest.mark.skipif(not peer_is_installed(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("variant", PEER_RUNS)
def test_llama_cpp_computes_the_logits_of_transformers(tmp_path: Path, variant: str) -> None:
    path = convert(write_checkpoint(tmp_path, CONFIGS[variant]))
    n_vocab = text_config(CONFIGS[variant])["vocab_size"]
    tokens = golden_tokens(CONFIGS[variant])
    # It computes a whole text again for each position of a model with a recurrent state.
    positions = slice(5, None, 12) if variant in HYBRID_CONFIGS else EVERYWHERE
    with LlamaCppPeer(path, n_ctx=256, n_threads=1) as peer:
        lengths = range(1, len(tokens) + 1)[positions]
        rows = [peer.next_token_logprobs(tokens[:length], n_vocab) for length in lengths]
    logprobs = np.zeros((len(rows), n_vocab), np.float32)
    for row, listed in zip(logprobs, rows, strict=True):
        assert len(listed) == n_vocab
        row[[token for token, _ in listed]] = [value for _, value in listed]
    assert kl_to_golden(variant, logprobs, positions) < MAX_KL_F16_KV


@pytest.mark.parametrize(
    "variant", [name for name in HYBRID_CONFIGS if name.startswith("qwen35") and "yarn" not in name]
)
def test_plain_restatement_computes_the_logits_of_transformers(tmp_path: Path, variant: str) -> None:
    """What other tests take for the truth about `qwen35` is held against an implementation of other hands."""
    path = convert(write_checkpoint(tmp_path, CONFIGS[variant]))
    logits = Qwen35Forward(path).logits(golden_tokens(CONFIGS[variant]))
    assert distance_to_golden(variant, logits).max() < 1e-4


@pytest.mark.parametrize("other", ["llama", "llama-linear", "llama-yarn"])
def test_comparison_tells_the_kinds_of_rope_scaling_apart(tmp_path: Path, other: str) -> None:
    path = convert(write_checkpoint(tmp_path, CONFIGS[other]))
    assert kl_to_golden("llama-llama3", engine_logits(path)) > 1e3 * MAX_KL_F16_KV


@pytest.mark.parametrize("variant", CONFIGS)
def test_every_tensor_holds_the_values_of_the_checkpoint(tmp_path: Path, variant: str) -> None:
    path = convert(write_checkpoint(tmp_path, CONFIGS[variant]))
    expected = expected_tensors(CONFIGS[variant])
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert found.keys() - {"rope_freqs.weight"} == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].data.reshape(values.shape), values, err_msg=name)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("variant", ["qwen3", "qwen3moe", "qwen4exp"])
def test_matrices_are_rounded_to_the_output_type_and_vectors_and_routers_stay_f32(
    tmp_path: Path, variant: str, dtype: str, outtype: str
) -> None:
    config = CONFIGS[variant]
    path = convert(write_checkpoint(tmp_path, config, dtype=dtype), outtype=outtype)
    file = GgufFile(path)
    expected = expected_tensors(config, dtype)
    for tensor in gguf.GGUFReader(path).tensors:
        source = np.ascontiguousarray(expected[tensor.name])
        if source.ndim == 1 or tensor.name.endswith(ROUTERS_AND_CONVOLUTIONS):
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            np.testing.assert_array_equal(tensor.data.reshape(source.shape), source)
        else:
            type_name = outtype if outtype != "q8_0" or source.shape[-1] % 32 == 0 else "f16"
            target = gguf.GGMLQuantizationType[type_name.upper()]
            assert tensor.tensor_type == target
            rounded = gguf.quants.dequantize(gguf.quants.quantize(source, target), target)
            found = dequantize(type_name, file.tensor_bytes(tensor.name), source.size)
            np.testing.assert_array_equal(found.reshape(source.shape), rounded, err_msg=tensor.name)
    assert file.metadata["general.file_type"] == {"f16": 1, "bf16": 32, "q8_0": 7}[outtype]


def test_norms_of_gemma3_are_widened_before_1_is_added(tmp_path: Path) -> None:
    """In BF16 a weight near 0 would vanish beside 1."""
    folder = write_checkpoint(tmp_path, CONFIGS["gemma3"], dtype="BF16")
    found = np.frombuffer(GgufFile(convert(folder, outtype="bf16")).tensor_bytes("output_norm.weight"), np.float32)
    bits = checkpoints.bf16_bits(checkpoints.weights(CONFIGS["gemma3"])["model.norm.weight"])
    np.testing.assert_array_equal(found, (bits.astype(np.uint32) << 16).view(np.float32) + np.float32(1))


@pytest.mark.parametrize(("dtype", "own"), [("F32", "bf16"), ("F16", "f16"), ("BF16", "bf16")])
def test_auto_keeps_the_sixteen_bit_type_of_the_checkpoint(tmp_path: Path, dtype: str, own: str) -> None:
    path = convert(write_checkpoint(tmp_path, CONFIGS["llama"], dtype=dtype), outtype="auto")
    assert {tensor.type_name for tensor in GgufFile(path).tensors} == {own, "f32"}


def test_rows_that_are_not_whole_blocks_become_f16(tmp_path: Path) -> None:
    config = CONFIGS["llama"] | {"hidden_size": 60, "head_dim": 16}
    types = {t.name: t.type_name for t in GgufFile(convert(write_checkpoint(tmp_path, config), outtype="q8_0")).tensors}
    assert types["blk.0.attn_q.weight"] == "f16"  # 60 columns
    assert types["blk.0.ffn_down.weight"] == "q8_0"  # 96 columns


def test_llama3_scaling_gives_the_published_divisors(tmp_path: Path) -> None:
    config = {
        **CONFIGS["llama"],
        "head_dim": 128,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
    }
    path = convert(write_checkpoint(tmp_path, config))
    divisors = np.frombuffer(GgufFile(path).tensor_bytes("rope_freqs.weight"), np.float32)
    blended = [1.20748, 1.55341, 2.02631, 2.69453, 3.68425, 5.25733]  # of Llama 3.1, pairs 29 to 34
    np.testing.assert_allclose(divisors, [*[1.0] * 29, *blended, *[8.0] * 29], rtol=5e-6)


def test_yarn_attention_factor_is_relative_to_the_usual_magnitude(tmp_path: Path) -> None:
    metadata = GgufFile(convert(write_checkpoint(tmp_path, CONFIGS["qwen2-tied-yarn"]))).metadata
    assert metadata["qwen2.rope.scaling.type"] == "yarn"
    assert metadata["qwen2.rope.scaling.factor"] == 4.0
    assert metadata["qwen2.rope.scaling.original_context_length"] == 64
    assert metadata["qwen2.rope.scaling.attn_factor"] == pytest.approx(1.1 / (0.1 * math.log(4.0) + 1.0))


def test_tied_checkpoint_with_a_stored_head_is_still_tied(tmp_path: Path) -> None:
    """transformers ignores such a head, so its values must not count."""
    config = CONFIGS["qwen3-tied"]
    folder = write_checkpoint(tmp_path, config)
    head = np.zeros((config["vocab_size"], config["hidden_size"]), np.float32)
    tensors = {**checkpoints.weights(config), "lm_head.weight": head}
    (folder / "model.safetensors").write_bytes(checkpoints.safetensors_bytes(tensors))
    assert "output.weight" not in {tensor.name for tensor in GgufFile(convert(folder)).tensors}
