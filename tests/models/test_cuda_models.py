"""Models of every architecture on a CUDA device against our CPU backend: the machine's card, or the emulated device.

The device multiplies f16 activations by decoded weights where the CPU has 8-bit ones for quantised weights, so files of
quantised weights are compared with the CPU's results for the same values stored in F32. Tolerance: mean KL divergence
1e-3 over all positions; of a correct model it is below 1e-4.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import (
    ControlVector,
    DraftOrder,
    EmbeddingWork,
    Engine,
    HiddenPool,
    LoraAdapter,
    Model,
    Sampler,
    Speculator,
    Work,
    backend_info,
)  # fmt: skip
from pyllama.errors import DeviceError, InvalidArgument, OutOfMemory
from support.adapters import random_matrices, write_adapter, write_control_vector
from support.cuda_engine import cuda_devices
from support.logits import assert_same_bits, greedy_tokens, log_softmax, position_logits
from support.requantize import requantize
from support.tiny_dflash import write_tiny_dflash
from support.tiny_eagle3 import write_tiny_eagle3
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import TinyQwen4Exp, write_tiny_qwen4exp

UNITS = (
    "rows", "rows_panel", "row_moves", "all_reduce", "streams", "block_conv", "panel", "repack", "kv_append",
    "block_index", "sparse_attention", "delta_net", "delta_net_chunked", "causal_conv", "routing", "linear_f32",
    "linear_f16", "linear_row_f16", "linear_q8_0", "linear_row_q8_0", "linear_prompt_f16", "linear_prompt_q8_0",
    "attention_decode_64", "attention_prompt_64", "attention_decode_64_counted", "attention_prompt_64_counted",
)  # fmt: skip
WIDTHS: dict[str, Any] = {"n_embd": 128, "head_dim": 64, "n_head": 4, "n_head_kv": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-f16": {"architecture": "llama", "weight_type": "f16", "n_expert": 0, "n_ff": 192},
    "llama-q8_0": {"architecture": "llama", "weight_type": "q8_0", "n_expert": 0, "n_ff": 192},
    "llama-bf16": {"architecture": "llama", "weight_type": "bf16", "n_expert": 0},
    "qwen2": {"architecture": "qwen2", "weight_type": "f16", "n_head": 2},
    "qwen3": {"architecture": "qwen3", "weight_type": "q8_0", "n_head_kv": 1},
    "qwen3-f32": {"architecture": "qwen3", "weight_type": "f32"},
    "qwen3moe": {"architecture": "qwen3moe", "weight_type": "q8_0", "n_expert": 5, "n_expert_used": 3, "n_ff": 64},
    "qwen3moe-mixed": {
        "architecture": "qwen3moe", "weight_type": "f16", "n_ff": 64,
        "tensor_types": {"ffn_gate_exps.weight": "q8_0", "ffn_down_exps.weight": "f32"},
    },
    "gemma3": {
        "architecture": "gemma3", "n_layer": 7, "tied": True, "weight_type": "f16",
        "metadata": {"gemma3.attention.sliding_window": 70, "gemma3.final_logit_softcapping": 4.0},
    },
    "qwen35": {"architecture": "qwen35", "n_layer": 4, "attention_interval": 2, "n_mtp": 1, "weight_type": "f16"},
    "qwen35moe": {"architecture": "qwen35moe", "n_layer": 2, "attention_interval": 2, "weight_type": "q8_0"},
    "qwen4exp": {"architecture": "qwen4exp", "weight_type": "f16"},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    with cuda_devices(UNITS, EMULATED_CUDA_DEVICES="2"):
        yield


def write_family(path: Path, name: str) -> Path:
    arguments = dict(FAMILIES[name])
    architecture = arguments.pop("architecture")
    if architecture == "qwen4exp":
        return write_tiny_qwen4exp(path, TinyQwen4Exp(head_dim=64, n_layer=2), **arguments)
    write = write_tiny_hybrid if architecture.startswith("qwen35") else write_tiny_model
    return write(path, architecture, **WIDTHS | arguments)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("cuda_models") / f"{request.param}.gguf", request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    model = Model(path, devices=["CUDA0"])
    yield model
    model.close()


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("cuda_models") / "llama.gguf", "llama-f16")


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("cuda_models") / "hybrid.gguf", "qwen35")


def require_two_devices() -> None:
    if "CUDA1" not in backend_info()["devices"]:
        pytest.skip("needs two devices")


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()


def divergence(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(expected || found) of each position, in nats."""
    assert np.isfinite(found).all()
    p, q = log_softmax(expected), log_softmax(found)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def on_cpu(path: Path) -> Model:
    """With the values of quantised weights in F32."""
    exact = path.with_suffix(".exact.gguf")
    if not exact.exists():
        requantize(path, exact, "f32")
    return Model(exact)


def test_logits_are_those_of_the_cpu(path: Path, model: Model) -> None:
    tokens = random_tokens(150, seed=1)
    reference = on_cpu(path)
    expected = position_logits(Engine(reference, n_ctx=512), tokens)
    engine = Engine(model, n_ctx=512)
    for chunk in (150, 9):  # a prompt, pieces that decode; both go over what the other kernels have
        found = np.sort(divergence(expected, position_logits(engine, tokens, chunk=chunk)))
        if "moe" in path.name or "qwen4exp" in path.name:
            found = found[:-3]  # where two experts or blocks are as good as each other, either may be chosen
        assert found.mean() <= 1e-3, chunk
        assert found.max() <= 1e-2, chunk


def test_a_row_has_the_same_bits_alone_and_among_others(path: Path, model: Model) -> None:
    tokens = random_tokens(64, seed=2)
    engine = Engine(model, n_ctx=1024, n_seq_max=4)
    together = position_logits(engine, tokens)
    for chunk in (1 if path.stem in ("llama-f16", "qwen35", "qwen3moe") else 7, 23):  # one at a time takes long
        engine.clear(0)
        for seq_id in (1, 2, 3):
            engine.clear(seq_id)
            engine.decode(random_tokens(5 * seq_id, seed=seq_id), [seq_id] * (5 * seq_id))
        rows = []
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            others = [(token, seq_id) for seq_id in (1, 2, 3) for token in random_tokens(seq_id, seed=start)]
            engine.decode(
                [*[token for token, _ in others], *piece],
                [*[seq_id for _, seq_id in others], *[0] * len(piece)],
                [*[False] * len(others), *[True] * len(piece)],
            )
            rows.append(engine.logits())
        assert_same_bits(np.concatenate(rows), together, f"{chunk} tokens at a time beside three others")


def test_greedy_texts_are_those_of_the_cpu(llama_path: Path) -> None:
    prompt = random_tokens(40, seed=3)
    expected = greedy_tokens(Engine(on_cpu(llama_path), n_ctx=512), prompt, 24)
    engine = Engine(Model(llama_path, devices=["CUDA0"]), n_ctx=512)
    assert greedy_tokens(engine, prompt, 24) == expected
    assert greedy_tokens(engine, prompt, 24) == expected  # recorded work is replayed now


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "f16")])
def test_quantised_caches_are_those_of_the_cpu(llama_path: Path, types: tuple[str, str]) -> None:
    tokens = random_tokens(300, seed=4)
    settings = {"n_ctx": 512, "type_k": types[0], "type_v": types[1]}
    reference = on_cpu(llama_path)
    exact = position_logits(Engine(reference, n_ctx=512, type_k="f32", type_v="f32"), tokens)
    expected = position_logits(Engine(reference, **settings), tokens)
    found = position_logits(Engine(Model(llama_path, devices=["CUDA0"]), **settings), tokens, chunk=64)
    loss = divergence(exact, expected).mean()  # by rounding the cache: a code may be off by one here and there
    assert abs(divergence(exact, found).mean() - loss) <= 0.05 * loss
    assert divergence(expected, found).mean() <= max(0.05 * loss, 1e-3)


@pytest.mark.parametrize("types", [("q5_1", "q5_0"), ("q4_1", "q5_1"), ("q5_0", "f16")])
def test_caches_that_cpus_do_not_have_lose_less_than_coarser_ones(llama_path: Path, types: tuple[str, str]) -> None:
    tokens = random_tokens(300, seed=4)
    reference = on_cpu(llama_path)
    exact = position_logits(Engine(reference, n_ctx=512, type_k="f32", type_v="f32"), tokens)
    coarse = position_logits(Engine(reference, n_ctx=512, type_k="q4_0", type_v="q4_0"), tokens)
    device = Model(llama_path, devices=["CUDA0"])
    for chunk in (64, 300):  # decode kernels, the prompt kernel
        engine = Engine(device, n_ctx=512, type_k=types[0], type_v=types[1])
        found = position_logits(engine, tokens, chunk=chunk)
        assert 0 < divergence(exact, found).mean() < divergence(exact, coarse).mean()


def test_a_saved_sequence_goes_on_with_the_same_bits(model: Model) -> None:
    tokens = random_tokens(60, seed=5)
    engine = Engine(model, n_ctx=512, n_seq_max=2)
    engine.decode(tokens[:40])
    state = engine.save_sequence(0)
    engine.decode(tokens[40:], [0] * 20, [True] * 20)
    expected = engine.logits()
    other = Engine(model, n_ctx=512, n_seq_max=2)
    other.load_sequence(1, state)
    other.decode(tokens[40:], [1] * 20, [True] * 20)
    assert_same_bits(other.logits(), expected, "loaded into another engine")


def test_a_cache_in_host_memory_gives_the_same_bits(hybrid_path: Path) -> None:
    tokens = random_tokens(300, seed=8)
    model = Model(hybrid_path, devices=["CUDA0"])
    with_cache = [
        Engine(model, n_ctx=1024, n_seq_max=2, cache_bytes=1 << 24, offload_kqv=kept) for kept in (True, False)
    ]
    expected, found = (position_logits(engine, tokens, chunk=100) for engine in with_cache)
    assert np.array_equal(found, expected)
    for engine in with_cache:
        engine.load_sequence(1, engine.save_sequence(0))
        engine.decode([5], [1])
    assert np.array_equal(with_cache[0].logits(), with_cache[1].logits())
    model.close()


def test_a_fork_and_a_reused_prefix_give_the_same_bits(llama_path: Path) -> None:
    tokens = random_tokens(600, seed=6)
    engine = Engine(Model(llama_path, devices=["CUDA0"]), n_ctx=2048, n_seq_max=3, cache_bytes=1 << 24)
    engine.decode(tokens[:560])
    engine.fork(0, 1, 530)
    reuse = engine.reuse_prefix(2, tokens, len(tokens) - 1, ())
    assert reuse.length >= 512
    rows = []
    for seq_id, begin in ((0, 560), (1, 530), (2, reuse.length)):
        if begin < 560:
            engine.decode(tokens[begin:560], [seq_id] * (560 - begin))
        engine.decode(tokens[560:], [seq_id] * 40, [True] * 40)
        rows.append(engine.logits())
    assert divergence(rows[0], rows[1]).max() <= 1e-3
    assert divergence(rows[0], rows[2]).max() <= 1e-3


def test_a_shifted_context_is_that_of_the_cpu(llama_path: Path) -> None:
    tokens = random_tokens(330, seed=7)
    results = []
    for model in (on_cpu(llama_path), Model(llama_path, devices=["CUDA0"])):
        engine = Engine(model, n_ctx=512)
        engine.decode(tokens[:300])
        engine.shift(0, 20, 100)
        engine.decode(tokens[300:], [0] * 30, [True] * 30)
        results.append(engine.logits())
    assert divergence(results[0], results[1]).mean() <= 1e-3


def test_adapters_and_control_vectors_do_what_they_do_on_the_cpu(llama_path: Path, tmp_path: Path) -> None:
    tokens = random_tokens(40, seed=10)
    parts = ("attn_q.weight", "ffn_gate.weight", "ffn_down.weight", "token_embd.weight")
    matrices = random_matrices(llama_path, lambda name: name.endswith(parts), rank=8)
    adapter = write_adapter(tmp_path / "adapter.gguf", matrices)
    directions = {1: np.random.default_rng(4).standard_normal(128).astype(np.float32)}
    control = write_control_vector(tmp_path / "control.gguf", directions)
    results = []
    for model in (on_cpu(llama_path), Model(llama_path, devices=["CUDA0"])):
        settings = {"adapters": [LoraAdapter(model, adapter)], "control": ControlVector(model, [(control, 0.5)])}
        engine = Engine(model, n_ctx=512, n_seq_max=2, **settings)
        engine.set_adapters(1, (0.7,))
        engine.decode([*tokens, *tokens], [0] * 40 + [1] * 40, [True] * 80)
        results.append(engine.logits())
    assert divergence(results[0], results[1]).mean() <= 1e-3
    assert divergence(results[0][:40], results[0][40:]).mean() > 0.1  # the adapter does something


def test_embeddings_and_scores_are_those_of_the_cpu(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "reranker.gguf", "qwen3", n_labels=3, weight_type="f16", **WIDTHS)
    tokens = random_tokens(90, seed=11)
    values = []
    for model in (on_cpu(path), Model(path, devices=["CUDA0"])):
        pools = [HiddenPool(kind, model.n_embd) for kind in ("mean", "last", "rank")]
        engine = Engine(model, n_ctx=1024, n_seq_max=3)
        engine.embed([EmbeddingWork(seq_id, tokens, pool) for seq_id, pool in enumerate(pools)])
        values.append([pool.values() for pool in pools])
    for expected, found in zip(*values, strict=True):
        assert np.abs(expected - found).max() <= 5e-3 * np.abs(expected).max()


def drafted_text(engine: Engine, kind: str, prompt: list[int], n_tokens: int) -> tuple[list[int], int]:
    """A greedy text, and how many drafted tokens of it stood."""
    speculator = Speculator(engine, (kind,), draft_n_max=5)
    sampler = Sampler(300, temperature=0.0)
    (output,) = engine.step([Work(0, prompt, sampler)])
    text, stood = [output.token], 0
    speculator.begin(0)
    while len(text) < n_tokens:
        (draft,) = speculator.draft([DraftOrder(0, text[-1], 5, 0.0, 0)])
        outputs = engine.step([Work(0, [text[-1]], sampler, draft=draft.tokens, proposals=draft.proposals)])
        text += [output.token for output in outputs]
        stood += len(outputs) - 1
        if draft.tokens:
            speculator.accept(0, len(draft.tokens), len(outputs) - 1)
    return text[:n_tokens], stood


@pytest.mark.parametrize("kind", ["draft-dflash", "draft-dspark", "draft-eagle3", "draft-mtp"])
@pytest.mark.parametrize(
    "placement",
    [
        {"devices": ["CUDA0"]},
        {"devices": ["CUDA0", "CUDA1"], "split_mode": "layer"},
        {"devices": ["CUDA0"], "device_layers": 3},
    ],
    ids=str,
)
def test_drafted_texts_are_those_without_drafts(
    hybrid_path: Path, tmp_path: Path, kind: str, placement: dict[str, Any]
) -> None:
    if len(placement["devices"]) > 1:
        require_two_devices()
    prompt = random_tokens(50, seed=8)
    expected = greedy_tokens(Engine(Model(hybrid_path, **placement), n_ctx=512), prompt, 40)
    arguments: dict[str, Any] = {"load_mtp": True}
    if kind == "draft-eagle3":
        widths = {"n_embd": 128, "target_hidden": 128, "head_dim": 64}
        drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", weight_type="f16", target_layers=(1, 4, 3), **widths)
        arguments = {"drafter": drafter}
    elif kind != "draft-mtp":
        shape: dict[str, Any] = {"n_embd": 128, "head_dim": 64, "target_layers": (1, 3), "window": 64}
        shape |= {"version": 1, "markov_rank": 32} if kind == "draft-dspark" else {}
        arguments = {"drafter": write_tiny_dflash(tmp_path / "drafter.gguf", weight_type="f16", **shape)}
    engine = Engine(Model(hybrid_path, **placement, **arguments), n_ctx=512)
    text, _ = drafted_text(engine, kind, prompt, 40)
    assert text == expected


@pytest.mark.parametrize(
    "placement",
    [{"devices": ["CUDA0"]}, {"devices": ["CUDA0", "CUDA1"], "split_mode": "layer"}],
    ids=str,
)
def test_drafts_of_a_model_of_several_streams_leave_its_text_as_it_is(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    if len(placement["devices"]) > 1:
        require_two_devices()
    shape = TinyQwen4Exp(head_dim=64, n_layer=2, top_k=16, mtp=True)
    path = write_tiny_qwen4exp(tmp_path / "predicting.gguf", shape, weight_type="f16")
    prompt = random_tokens(50, seed=8)
    expected = greedy_tokens(Engine(Model(path, **placement), n_ctx=512), prompt, 30)
    engine = Engine(Model(path, **placement, load_mtp=True), n_ctx=512)
    assert drafted_text(engine, "draft-mtp", prompt, 30)[0] == expected


@pytest.mark.parametrize("split_mode", ["layer", "tensor"])
def test_a_model_on_two_devices_or_a_device_and_a_cpu_has_the_logits_of_one(llama_path: Path, split_mode: str) -> None:
    require_two_devices()
    tokens = random_tokens(24, seed=9)
    expected = position_logits(Engine(on_cpu(llama_path), n_ctx=512), tokens)
    for devices in (["CUDA0", "CUDA1"], ["CPU", "CUDA0"]):
        model = Model(llama_path, devices=devices, split_mode=split_mode)
        found = position_logits(Engine(model, n_ctx=512), tokens, chunk=12)
        assert divergence(expected, found).mean() <= 1e-3, devices


def test_a_prompt_without_logits_on_two_devices_is_done_when_its_state_is_saved(llama_path: Path) -> None:
    require_two_devices()
    tokens = random_tokens(12, seed=13)
    model = Model(llama_path, devices=["CUDA0", "CUDA1"], split_mode="tensor")
    engine, other = (Engine(model, n_ctx=512) for _ in range(2))
    engine.step([Work(0, tokens[:8], None)])
    other.load_sequence(0, engine.save_sequence(0))
    rows = []
    for one in (engine, other):
        one.decode(tokens[8:], [0] * 4, [True] * 4)
        rows.append(one.logits())
    assert_same_bits(rows[1], rows[0], "loaded into another engine")


def test_after_a_failure_of_one_device_the_others_stop_waiting_and_go_on(llama_path: Path) -> None:
    require_two_devices()
    tokens = random_tokens(8, seed=12)
    engine = Engine(Model(llama_path, devices=["CUDA0", "CUDA1"], split_mode="tensor"), n_ctx=512)
    expected = position_logits(engine, tokens)
    engine._inject_fault(1, 20)
    with pytest.raises(DeviceError, match=r"rank 1 \(CUDA1\): injected fault"):
        position_logits(engine, tokens)
    assert_same_bits(position_logits(engine, tokens), expected, "after a failure")


def test_what_a_device_cannot_have_is_refused_by_name(llama_path: Path, tmp_path: Path) -> None:
    model = Model(llama_path, devices=["CUDA0"])
    with pytest.raises(
        InvalidArgument, match=r"a KV cache of type bf16 cannot be on a CUDA device; expected f16, q8_0"
    ):
        Engine(model, n_ctx=256, type_k="bf16")
    odd = Model(write_tiny_llama(tmp_path / "odd.gguf", head_dim=48, weight_type="f16"), devices=["CUDA0"])
    with pytest.raises(InvalidArgument, match="heads of 48 features cannot be on a CUDA device; expected 64, 80"):
        Engine(odd, n_ctx=256)
    with pytest.raises(OutOfMemory, match=r"CUDA0: \d+ MiB of device memory asked for, \d+ MiB are free"):
        Engine(model, n_ctx=1 << 30)
    with pytest.raises(InvalidArgument, match="device 'CUDA999' is not there; expected one of CPU"):
        Model(llama_path, devices=["CUDA999"])
