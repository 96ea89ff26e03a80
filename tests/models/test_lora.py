"""LoRA adapters in the engine, against the same model with W + scale * B A written into its file.

What is summed is the same up to rounding, so logits are compared to rounding with F32 weights and caches. Bits are
compared where the engine promises them: scale 0 and no adapter, a sequence alone and among others, text computed and
text reused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import Engine, LoraAdapter, Model, Sampler, Work
from pyllama.errors import InvalidArgument
from support.adapters import LOOKED_UP, merge, random_matrices, write_adapter
from support.logits import assert_same_bits, position_logits
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import write_tiny_qwen4exp

EXACT = 1e-4  # largest difference of logits, relative to the largest of the row
F32_CACHE = {"type_k": "f32", "type_v": "f32"}
TOKENS = np.random.default_rng(77).integers(3, 290, 40).tolist()
GEMMA = {"gemma3.attention.sliding_window": 20, "gemma3.final_logit_softcapping": 4.0}

CASES: dict[str, tuple[str, Callable[..., Path], dict[str, Any]]] = {
    "llama": ("llama", write_tiny_llama, {}),
    "llama-fused-qkv": ("llama", write_tiny_llama, {"fused_qkv": True}),
    "qwen2-biases": ("qwen2", write_tiny_model, {"architecture": "qwen2"}),
    "qwen3moe": ("qwen3moe", write_tiny_model, {"architecture": "qwen3moe", "n_expert": 5, "n_expert_used": 3}),
    "mixtral": ("llama", write_tiny_model, {"architecture": "llama"}),
    "gemma3": ("gemma3", write_tiny_model, {"architecture": "gemma3", "metadata": GEMMA}),
    "qwen35": ("qwen35", write_tiny_hybrid, {}),
    "qwen35moe": ("qwen35moe", write_tiny_hybrid, {"architecture": "qwen35moe", "fused_gate_up": True}),
    "qwen4exp": ("qwen4exp", write_tiny_qwen4exp, {}),
}


def is_adapted(name: str) -> bool:
    """Matrices that are multiplied or looked up; not convolutions, and not the table of an n-gram memory."""
    is_matrix = name.endswith(".weight") and "norm" not in name and "conv1d" not in name
    return is_matrix and name not in ("per_layer_token_embd.weight", "rope_freqs.weight") and "ffn_gate_inp" not in name


def differs(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float((np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)).max())


class Adapted:
    """An engine with adapters, all files in one folder."""

    def __init__(self, path: Path, adapters: list[Path], *, n_seq_max: int = 1, **options: Any) -> None:
        keys = ("devices", "split_mode", "isa", "device_layers", "tensor_overrides")
        placement = {key: options.pop(key) for key in keys if key in options}
        self.model = Model(path, **placement)
        loaded = [LoraAdapter(self.model, adapter) for adapter in adapters]
        self.engine = Engine(
            self.model, n_ctx=1024, n_threads=2, n_seq_max=n_seq_max, adapters=loaded, **{**F32_CACHE, **options}
        )

    def logits(self, scales: tuple[float, ...] = (), tokens: list[int] = TOKENS, **options: Any) -> NDArray[np.float32]:
        self.engine.clear(0)
        self.engine.set_adapters(0, scales)
        return position_logits(self.engine, tokens, **options)

    def close(self) -> None:
        self.engine.close()
        self.model.close()


def plain_logits(path: Path, **options: Any) -> NDArray[np.float32]:
    plain = Adapted(path, [], **options)
    logits = plain.logits()
    plain.close()
    return logits


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Path]:
    """Architecture, model, matrices and the adapter's file."""
    architecture, write, arguments = CASES[request.param]
    folder = tmp_path_factory.mktemp("lora")
    model = write(folder / "model.gguf", **arguments)
    matrices = random_matrices(model, is_adapted)
    return architecture, model, matrices, write_adapter(folder / "a.gguf", matrices, architecture=architecture)


def test_an_adapted_model_computes_what_the_merged_one_does(case, tmp_path):
    architecture, path, matrices, file = case
    adapted = Adapted(path, [file])
    plain = adapted.logits()
    for scale in (1.0, -0.4):
        merged = plain_logits(merge(path, tmp_path / "m.gguf", [(matrices, scale)], architecture=architecture))
        assert differs(plain, merged) > 50 * EXACT, "the adapter must matter"
        assert differs(adapted.logits((scale,)), merged) < EXACT
    adapted.close()


def test_an_adapter_of_scale_0_leaves_every_bit(case):
    _, path, _, file = case
    adapted = Adapted(path, [file])
    expected = plain_logits(path)
    assert_same_bits(adapted.logits((0.0,)), expected, "scale 0")
    assert_same_bits(adapted.logits(), expected, "no scales")
    adapted.close()


def test_sequences_of_other_scales_in_the_batch_change_no_bit(case):
    _, path, _, file = case
    adapted = Adapted(path, [file], n_seq_max=4)
    scales = (0.0, 0.3, 0.7, 1.0)
    alone = [adapted.logits((scale,)) for scale in scales]
    engine = adapted.engine
    for sequence, scale in enumerate(scales):
        engine.clear(sequence)
        engine.set_adapters(sequence, [scale])
    rows: list[list[Any]] = [[] for _ in scales]
    for start in (0, 10, 17, 18):
        stop = {0: 10, 10: 17, 17: 18, 18: len(TOKENS)}[start]
        piece = TOKENS[start:stop]
        order = [0, 1, 2, 3] if start % 2 == 0 else [3, 1, 0, 2]
        engine.decode(piece * 4, [s for s in order for _ in piece], [True] * (4 * len(piece)))
        logits = engine.logits().reshape(4, len(piece), -1)
        for at, sequence in enumerate(order):
            rows[sequence].append(logits[at])
    for sequence, expected in enumerate(alone):
        assert_same_bits(np.concatenate(rows[sequence]), expected, f"scale {scales[sequence]}")
    adapted.close()


@pytest.mark.parametrize(
    "placement",
    [
        {"n_ranks": 2, "split_mode": "tensor"},
        {"n_ranks": 3, "split_mode": "tensor"},
        {"n_ranks": 2, "split_mode": "layer"},
        {"n_ranks": 1, "device_layers": 2},
        {"n_ranks": 1, "tensor_overrides": [(r"blk\.\d+\.ffn_", "CPU")]},
    ],
    ids=str,
)
def test_ranks_share_the_adapter_as_they_share_the_weights(case, placement):
    _, path, _, file = case
    placement = dict(placement)
    devices = tuple(f"CPU{i}" for i in range(placement.pop("n_ranks")))
    alone, split = Adapted(path, [file]), Adapted(path, [file], devices=devices, **placement)
    assert differs(split.logits((0.8,)), alone.logits((0.8,))) < EXACT
    alone.close()
    split.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    model = write_tiny_llama(folder / "model.gguf")
    first = random_matrices(model, is_adapted)
    second = random_matrices(model, lambda name: name.endswith(("attn_v.weight", "ffn_down.weight")), rank=3, seed=6)
    return model, first, second, write_adapter(folder / "1.gguf", first), write_adapter(folder / "2.gguf", second)


def test_several_adapters_add_up(tiny, tmp_path):
    path, first, second, *files = tiny
    adapted = Adapted(path, files)
    for scales in ((0.6, 1.5), (0.0, 1.0), (1.0, 0.0)):
        merged = merge(path, tmp_path / "m.gguf", zip((first, second), scales, strict=True), architecture="llama")
        assert differs(adapted.logits(scales), plain_logits(merged)) < EXACT, scales
    adapted.close()


def test_without_an_alpha_the_scale_is_taken_as_it_is(tiny, tmp_path):
    path, first, *_ = tiny
    adapted = Adapted(path, [write_adapter(tmp_path / "a.gguf", first, alpha=None)])
    merged = merge(path, tmp_path / "m.gguf", [(first, 0.5)], architecture="llama", alpha=4.0)  # of rank 4
    assert differs(adapted.logits((0.5,)), plain_logits(merged)) < EXACT
    adapted.close()


@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0"])
def test_adapters_of_other_types_are_decoded(tmp_path, type_name):
    path = write_tiny_llama(tmp_path / "model.gguf")
    matrices = random_matrices(path, is_adapted, rank=32)
    file = write_adapter(tmp_path / "a.gguf", matrices, type_name=type_name)
    adapted = Adapted(path, [file])
    merged = plain_logits(merge(path, tmp_path / "m.gguf", [(matrices, 1.0)], architecture="llama"))
    assert differs(adapted.logits((1.0,)), merged) < 0.1
    rounded = {}
    import gguf

    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        rounded[tensor.name] = values.astype(np.float32)
    exact = {name: (rounded[f"{name}.lora_a"], rounded[f"{name}.lora_b"]) for name in matrices}
    merged = plain_logits(merge(path, tmp_path / "m.gguf", [(exact, 1.0)], architecture="llama"))
    assert differs(adapted.logits((1.0,)), merged) < EXACT
    adapted.close()


def test_every_instruction_set_gives_the_bits_of_the_reference(tiny):
    from pyllama._engine import backend_info

    path, _, _, *files = tiny
    results = {}
    for isa in backend_info()["available"]:
        adapted = Adapted(path, files, isa=isa)
        results[isa] = adapted.logits((0.7, -1.0), TOKENS[:12])
        adapted.close()
    for isa, logits in results.items():
        assert_same_bits(logits, results["reference"], isa)


def test_quantised_models_are_adapted_beside_their_integer_products(tmp_path):
    path = write_tiny_llama(tmp_path / "q.gguf", weight_type="q8_0")
    matrices = random_matrices(path, lambda name: "attn" in name and "norm" not in name)
    adapted = Adapted(path, [write_adapter(tmp_path / "a.gguf", matrices)])
    import gguf

    from support.rewritten_gguf import rewrite

    floats = tmp_path / "f.gguf"
    decoded = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    rewrite(path, floats, tensors=lambda name, data: decoded[name].astype(np.float32))
    merged = plain_logits(merge(floats, tmp_path / "m.gguf", [(matrices, 1.0)], architecture="llama"))
    change = differs(plain_logits(floats), merged)
    assert differs(adapted.logits((1.0,)), merged) < 0.2 * change
    adapted.close()


def test_embeddings_of_a_tied_model_are_adapted_where_they_are_looked_up_only(tmp_path):
    path = write_tiny_llama(tmp_path / "tied.gguf", tied=True)
    matrices = random_matrices(path, lambda name: name == LOOKED_UP)
    adapted = Adapted(path, [write_adapter(tmp_path / "a.gguf", matrices)])
    import gguf

    from support.rewritten_gguf import rewrite

    head = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == LOOKED_UP)
    untied = rewrite(path, tmp_path / "untied.gguf", extra={"output.weight": np.array(head)})
    merged = merge(untied, tmp_path / "m.gguf", [(matrices, 1.0)], architecture="llama")
    assert differs(adapted.logits((1.0,)), plain_logits(merged)) < EXACT
    adapted.close()


# ------------------------------------------------------------------------------------------------ what sequences hold


def long_tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n).tolist()


def last_logits(engine: Engine, sequence: int, prompt: list[int], scales: tuple[float, ...]) -> Any:
    """(tokens reused, logits after the prompt), as a server computes it."""
    reuse = engine.reuse_prefix(sequence, prompt, len(prompt) - 1, scales)
    rest = prompt[reuse.length :]
    engine.decode(rest, [sequence] * len(rest))
    return reuse, engine.logits()[-1:]


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_hybrid], ids=["llama", "qwen35"])
def test_reuse_never_crosses_scales(write, tmp_path):
    path = write(tmp_path / "model.gguf")
    architecture = "llama" if write is write_tiny_llama else "qwen35"
    matrices = random_matrices(path, lambda name: "attn" in name and is_adapted(name))
    file = write_adapter(tmp_path / "a.gguf", matrices, architecture=architecture)
    prompt = long_tokens(300, 3)

    def fresh() -> Adapted:
        return Adapted(path, [file], n_seq_max=2, cache_bytes=1 << 28, n_checkpoints=8)

    def cold(scales: tuple[float, ...]) -> NDArray[np.float32]:
        adapted = fresh()
        _, logits = last_logits(adapted.engine, 0, prompt, scales)
        adapted.close()
        return logits

    expected = {scales: cold(scales) for scales in ((), (1.0,), (0.5,))}
    warm = fresh()
    engine = warm.engine
    for scales in ((1.0,), (0.0,), (0.5,)):  # one after another in one sequence, whose old text goes to host memory
        reuse, logits = last_logits(engine, 0, prompt, scales)
        assert (reuse.length, reuse.source, reuse.limit) == (0, "nothing", "not cached"), scales
        assert_same_bits(logits, expected[() if scales == (0.0,) else scales], f"first {scales}")
        engine.checkpoint(0)
    reuse, logits = last_logits(engine, 1, [*prompt, 9, 9], (0.5,))  # shared with the live one
    assert (reuse.length, reuse.source) == (300, "other")
    assert engine.adapters(1) == (0.5,)
    for scales in ((1.0,), (), (0.5,)):  # back from host memory
        reuse = engine.reuse_prefix(0, [*prompt, 7], 300, scales)
        assert reuse.length == 300, (scales, reuse)
        assert engine.adapters(0) == scales
        engine.decode([7], [0])
        continued = engine.logits()[-1:]
        other = fresh()
        last_logits(other.engine, 0, prompt, scales)
        other.engine.decode([7], [0])
        assert_same_bits(continued, other.engine.logits()[-1:], f"reused {scales}")
        other.close()
    warm.close()


def test_a_saved_sequence_brings_its_scales_along(tiny):
    path, _, _, *files = tiny
    adapted = Adapted(path, files)
    adapted.logits((0.0, 0.5))
    saved = adapted.engine.save_sequence(0)
    adapted.engine.decode([5], [0])
    expected = adapted.engine.logits()
    adapted.logits((1.0, 0.0))
    adapted.engine.load_sequence(0, saved)
    assert adapted.engine.adapters(0) == (0.0, 0.5)
    adapted.engine.decode([5], [0])
    assert_same_bits(adapted.engine.logits(), expected, "after loading")

    swapped = Adapted(path, files[::-1])  # the same adapters under other numbers
    swapped.engine.load_sequence(0, saved)
    assert swapped.engine.adapters(0) == (0.5, 0.0)
    without = Adapted(path, files[:1])
    with pytest.raises(InvalidArgument, match="LoRA adapter that is not loaded"):
        without.engine.load_sequence(0, saved)
    assert without.engine.length(0) == 0
    for other in (adapted, swapped, without):
        other.close()


def test_scales_are_changed_only_where_nothing_was_computed_with_others(tiny):
    path, _, _, *files = tiny
    adapted = Adapted(path, files, n_seq_max=2)
    engine = adapted.engine
    engine.set_adapters(0, (1.0, 0.0))
    engine.decode([5, 6], [0, 0])
    engine.set_adapters(0, (1.0, -0.0))
    for scales in ((), (0.0, 0.0), (1.0, 0.5)):
        with pytest.raises(InvalidArgument, match="holds 2 tokens that were computed with other adapters"):
            engine.set_adapters(0, scales)
    engine.fork(0, 1, 1)
    assert engine.adapters(1) == (1.0, 0.0)
    engine.clear(0)
    engine.set_adapters(0, ())
    assert engine.adapters(0) == ()
    for scales, message in (
        ((1.0,), "1 scales for 2 adapters"),
        ((1.0, float("inf")), "not finite"),
        ((1e300, 0.0), "not finite"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            engine.set_adapters(0, scales)
    with pytest.raises(InvalidArgument):
        engine.set_adapters(7, ())
    adapted.close()


def test_steps_draw_with_the_scales_of_each_sequence(tiny):
    path, _, _, *files = tiny
    adapted = Adapted(path, files, n_seq_max=3)
    engine = adapted.engine
    prompt, settings = TOKENS[:9], ((0.0, 0.0), (1.0, 0.0), (0.3, 1.0))

    def drawn(sequences: list[int]) -> dict[int, list[int]]:
        for sequence in sequences:
            engine.clear(sequence)
            engine.set_adapters(sequence, settings[sequence])
        samplers = {s: Sampler(adapted.model.n_vocab, seed=1, temperature=0.0) for s in sequences}
        outputs = engine.step([Work(s, prompt, samplers[s]) for s in sequences], 12)
        return {s: [output.token for output in outputs if output.seq_id == s] for s in sequences}

    together = drawn([0, 1, 2])
    for sequence in range(3):
        assert drawn([sequence])[sequence] == together[sequence]
    assert together[0] != together[1] != together[2]
    adapted.close()
