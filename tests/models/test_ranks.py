"""A model split over ranks computes what it computes on one: the same greedy text and the same logits up to rounding,
bit for bit where whole layers, or whole parts of them, are shared out.

The ranks are CPU devices. Cuts as arithmetic: tests/unit/test_split.py; ranks that fail: test_rank_faults.py.

Splitting changes only the order in which partial sums are added. With f32 weights and caches that is a relative
difference of 1e-6 to 1e-5. Values rounded to 8 bits or to f16 on their way may round the other way then, by 1/127 of
the largest of their block: with those the logits may differ by a percent, and so may a choice between tokens that
close.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama._engine import EmbeddingWork, Engine, HiddenPool, MemoryNeeds, Model, Sampler, Work
from pyllama.errors import InvalidArgument
from support.logits import assert_same_bits, position_logits
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_models import write_tiny_model
from support.tiny_qwen4exp import TinyQwen4Exp, write_tiny_qwen4exp

RANKS = (2, 3, 4, 5, 6, 8)
F32_CACHE = {"type_k": "f32", "type_v": "f32"}
EXACT, ROUNDED = 5e-5, 2e-2  # largest difference of logits, relative to the largest logit of the row
SCORES = 50  # positions compared


class Case:
    def __init__(self, write: Callable[..., Path], tolerance: float, cache: dict[str, str], **arguments: Any) -> None:
        self.write, self.tolerance, self.cache, self.arguments = write, tolerance, cache, arguments


def exact(write: Callable[..., Path], **arguments: Any) -> Case:
    return Case(write, EXACT, F32_CACHE, **arguments)


def rounded(write: Callable[..., Path], cache: str = "f16", **arguments: Any) -> Case:
    return Case(write, ROUNDED, {"type_k": cache, "type_v": cache}, **arguments)


GEMMA = {"gemma3.attention.sliding_window": 40, "gemma3.final_logit_softcapping": 4.0}
CASES = {
    "llama": exact(write_tiny_model, architecture="llama", n_expert=0, n_head=8, n_head_kv=4),
    "llama-9-heads": exact(write_tiny_model, architecture="llama", n_expert=0, n_head=9, n_head_kv=3, head_dim=8),
    "qwen2-biases": exact(write_tiny_model, architecture="qwen2"),
    "qwen3-24-heads": exact(write_tiny_model, architecture="qwen3", n_head=24, n_head_kv=4, head_dim=16),
    "qwen3moe": exact(write_tiny_model, architecture="qwen3moe", n_expert=5, n_expert_used=3),
    "mixtral": exact(write_tiny_model, architecture="llama"),
    "gemma3": exact(write_tiny_model, architecture="gemma3", n_layer=7, tied=True, metadata=GEMMA),
    "qwen35": exact(write_tiny_hybrid, n_key_head=4, n_value_head=12, n_head=6, n_head_kv=2),
    "qwen35moe": exact(write_tiny_hybrid, architecture="qwen35moe", fused_gate_up=True),
    "qwen4exp": exact(
        write_tiny_qwen4exp, shape=TinyQwen4Exp(n_head=12, n_head_kv=4, key_heads=4, value_heads=8), fused_gate_up=True
    ),
    "llama-q8_0": rounded(
        write_tiny_model, "q8_0", architecture="llama", n_expert=0, n_head=8, n_head_kv=4, head_dim=32, n_ff=256,
        weight_type="q8_0",
    ),
    "llama-q4_k": rounded(
        write_tiny_model, architecture="llama", n_expert=0, n_embd=256, n_head=8, n_head_kv=4, head_dim=64, n_ff=1024,
        weight_type="q4_k",
    ),
    "qwen3moe-q4_k": rounded(
        write_tiny_model, "q4_0", architecture="qwen3moe", weight_type="q4_k", n_embd=256, n_ff=256, n_head=4,
        n_head_kv=2, head_dim=128,
    ),
    "qwen35-q8_0": rounded(write_tiny_hybrid, "q8_0", n_key_head=4, n_value_head=8, weight_type="q8_0"),
    "qwen35-q4_k": rounded(
        write_tiny_hybrid, n_embd=256, n_ff=512, n_key_head=4, n_value_head=8, state_size=64, head_dim=64,
        weight_type="q4_k",
    ),
}  # fmt: skip


def random_tokens(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, n_tokens).tolist()


PROMPT = random_tokens(SCORES, seed=21)


def cpus(n_ranks: int) -> tuple[str, ...]:
    return tuple(f"CPU{i}" for i in range(n_ranks))


class Computed:
    """Logits after each token of the prompt, and the greedy text that follows with the logits it was chosen from."""

    def __init__(self, path: Path, cache: dict[str, str], **placement: Any) -> None:
        model = Model(path, **placement)
        engine = Engine(model, n_ctx=512, n_threads=2, **cache)
        self.rank_bytes = model.rank_bytes
        self.logits = position_logits(engine, PROMPT)
        self.text, self.choices = [], []
        for _ in range(16):
            self.choices.append(self.logits[-1] if not self.text else engine.logits()[-1])
            self.text.append(int(np.argmax(self.choices[-1])))
            engine.decode(self.text[-1:])
        engine.close()
        model.close()


def relative_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float((np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)).max())


def assert_same_text(found: Computed, expected: Computed, tolerance: float) -> None:
    for step, (token, other) in enumerate(zip(found.text, expected.text, strict=True)):
        logits = expected.choices[step]
        if token == other:
            continue
        gap = float((logits[other] - logits[token]) / np.abs(logits).max())
        assert gap <= 2 * tolerance, f"token {step} is {token}, expected {other}, which leads by {gap:.1e}"
        return


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def path(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.write(tmp_path_factory.mktemp("ranks") / "model.gguf", **case.arguments)


@pytest.fixture(scope="module")
def alone(case: Case, path: Path) -> Computed:
    return Computed(path, case.cache)


@pytest.mark.parametrize("n_ranks", RANKS)
def test_tensors_over_ranks_give_the_text_and_logits_of_one(
    case: Case, path: Path, alone: Computed, n_ranks: int
) -> None:
    split = Computed(path, case.cache, devices=cpus(n_ranks), split_mode="tensor")
    assert relative_difference(split.logits, alone.logits) <= case.tolerance
    assert_same_text(split, alone, case.tolerance)


@pytest.mark.parametrize("shares", [(3, 1), (0.2, 0.5, 0.3), (1, 0, 1), (0, 0, 1, 1), (0.05, 0.95)], ids=str)
def test_uneven_and_zero_shares_give_the_text_and_logits_of_one(
    case: Case, path: Path, alone: Computed, shares: tuple[float, ...]
) -> None:
    split = Computed(path, case.cache, devices=cpus(len(shares)), split_mode="tensor", tensor_split=shares)
    assert relative_difference(split.logits, alone.logits) <= case.tolerance
    assert_same_text(split, alone, case.tolerance)
    for n_bytes, share in zip(split.rank_bytes, shares, strict=True):
        # What is replicated (routers, mixers of streams: half of the tiny qwen4exp) is on idle ranks too.
        assert share > 0 or n_bytes < 0.6 * max(split.rank_bytes)


@pytest.mark.parametrize(
    "placement",
    [
        {"devices": cpus(2)},
        {"devices": cpus(3), "tensor_split": (1, 0, 1)},
        {"devices": cpus(4), "tensor_split": (0, 3, 1)},
        {"devices": cpus(8)},  # more than some of the models have layers
    ],
    ids=str,
)
def test_whole_layers_over_ranks_give_the_bits_of_one(
    case: Case, path: Path, alone: Computed, placement: dict[str, Any]
) -> None:
    split = Computed(path, case.cache, split_mode="layer", **placement)
    assert_same_bits(split.logits, alone.logits, str(placement))
    assert split.text == alone.text


@pytest.mark.parametrize(
    "placement",
    [
        {"devices": cpus(1), "device_layers": 0},
        {"devices": cpus(1), "device_layers": 1},  # the output matrix alone
        {"devices": cpus(1), "device_layers": 2},
        {"devices": cpus(2), "device_layers": 2},
        {"devices": cpus(1), "tensor_overrides": [(r"\.ffn_", "CPU")]},
        {"devices": cpus(2), "tensor_overrides": [(r"blk\.0\.", "CPU"), (r"blk\.1\.ffn_", "CPU")]},
        {"devices": cpus(1), "device_layers": 2, "tensor_overrides": [(r"\.ffn_", "CPU0"), ("^output", "CPU")]},
    ],
    ids=str,
)
def test_layers_and_single_tensors_left_to_the_host_give_the_bits_of_one(
    case: Case, path: Path, alone: Computed, placement: dict[str, Any]
) -> None:
    """Where one rank has all of a part, the others add zeros to it."""
    split = Computed(path, case.cache, **placement)
    assert_same_bits(split.logits, alone.logits, str(placement))
    assert split.text == alone.text


@pytest.mark.parametrize(
    "placement",
    [
        {"devices": cpus(2), "device_layers": 2},
        {"devices": cpus(2), "tensor_overrides": [(r"\.ffn_", "CPU")]},
        {
            "devices": cpus(3),
            "tensor_split": (2, 1, 1),
            "device_layers": 99,
            "tensor_overrides": [(r"\.(attn|ssm)_", "CPU1")],
        },
    ],
    ids=str,
)
def test_divided_layers_beside_the_host_give_the_text_and_logits_of_one(
    case: Case, path: Path, alone: Computed, placement: dict[str, Any]
) -> None:
    split = Computed(path, case.cache, split_mode="tensor", **placement)
    assert relative_difference(split.logits, alone.logits) <= case.tolerance
    assert_same_text(split, alone, case.tolerance)


@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"devices": cpus(1), "device_layers": 2},
        {"devices": cpus(2), "split_mode": "tensor"},
        {"devices": cpus(2), "tensor_overrides": [(r"blk\.1\.ffn_", "CPU")]},
    ],
    ids=str,
)
def test_the_needs_of_a_placement_are_what_loading_it_takes(case: Case, path: Path, placement: dict[str, Any]) -> None:
    swa_full = case.arguments.get("architecture") != "gemma3"
    sizes = {"n_ctx": 2048, "n_seq_max": 3, "swa_full": swa_full, **case.cache}
    needs = MemoryNeeds(path).of(**sizes, **placement)
    model = Model(path, **placement)
    engine = Engine(model, **sizes)
    assert tuple(need.device for need in needs) == model.devices
    for need, matrices in zip(needs, model.rank_bytes, strict=True):
        vectors = need.weights - matrices
        assert 0 <= vectors <= 0.2 * max(matrices, max(model.rank_bytes))
    if swa_full:
        assert sum(need.kv for need in needs) == engine.kv_bytes
    else:
        assert sum(need.kv for need in needs) >= engine.kv_bytes
    assert any(need.states > 0 for need in needs) == model.is_recurrent
    wider = MemoryNeeds(path).of(**sizes, **placement, n_ubatch=1024)
    assert all(more.compute > need.compute > 0 for more, need in zip(wider, needs, strict=True))
    engine.close()
    model.close()


def test_the_reference_splits_like_every_instruction_set(case: Case, path: Path) -> None:
    """Three ranks: heads cut inside a group, ranks without heads."""
    tokens = PROMPT[:20]
    results = []
    for isa in ("reference", "auto"):
        model = Model(path, isa=isa, devices=cpus(3), split_mode="tensor")
        engine = Engine(model, n_ctx=256, n_threads=2, **case.cache)
        results.append(position_logits(engine, tokens))
        engine.close()
        model.close()
    assert_same_bits(results[1], results[0], "auto")


# ---- one model on three ranks

THREE = {"devices": cpus(3), "split_mode": "tensor"}


@pytest.fixture(scope="module")
def hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(
        tmp_path_factory.mktemp("hybrid") / "model.gguf", n_head=24, n_head_kv=4, n_key_head=4, n_value_head=8
    )


@pytest.fixture(scope="module")
def split_model(hybrid_path: Path) -> Iterator[Model]:
    model = Model(hybrid_path, **THREE)
    yield model
    model.close()


def test_a_wrong_share_would_be_noticed(hybrid_path: Path) -> None:
    """Negative control: one weight in 64 off by a tenth moves the logits by far more than a split may."""
    rewritten = hybrid_path.with_name("other.gguf")
    data = bytearray(hybrid_path.read_bytes())
    start = len(data) - 4096  # inside the last matrix
    values = np.frombuffer(bytes(data[start:]), dtype="<f4").copy()
    values[::64] *= 1.1
    data[start:] = values.tobytes()
    rewritten.write_bytes(data)
    plain, other = (Computed(p, F32_CACHE) for p in (hybrid_path, rewritten))
    assert relative_difference(other.logits, plain.logits) > 20 * EXACT


def test_chunks_threads_and_neighbours_do_not_change_the_bits_of_a_split_model(split_model: Model) -> None:
    tokens = random_tokens(120, seed=22)
    results = []
    for n_threads, chunk in ((1, None), (5, 17), (2, 1)):
        engine = Engine(split_model, n_ctx=1024, n_seq_max=2, n_threads=n_threads)
        engine.decode(random_tokens(30, seed=23), [1] * 30)
        results.append(position_logits(engine, tokens, chunk=chunk))
        engine.close()
    for result in results[1:]:
        assert_same_bits(result, results[0], "threads and chunks")


def test_steps_of_several_sequences_with_samplers_draw_what_one_rank_draws(
    hybrid_path: Path, split_model: Model
) -> None:
    prompts = {seq_id: random_tokens(10 + 7 * seq_id, seed=seq_id) for seq_id in range(3)}
    answers = []
    for model in (Model(hybrid_path), split_model):
        engine = Engine(model, n_ctx=1024, n_seq_max=3, **F32_CACHE)
        samplers = {seq_id: Sampler(model.n_vocab, temperature=0.7, seed=seq_id) for seq_id in prompts}
        pending, drawn = dict(prompts), []
        for _ in range(12):
            for output in engine.step([Work(seq_id, pending[seq_id], samplers[seq_id]) for seq_id in prompts]):
                drawn.append(output.token)
                pending[output.seq_id] = [output.token]
        answers.append(drawn)
        engine.close()
    assert answers[1] == answers[0]


def test_saved_forked_and_kept_sequences_of_a_split_model_continue_with_the_same_bits(split_model: Model) -> None:
    tokens = random_tokens(290, seed=24)
    engine = Engine(split_model, n_ctx=2048, n_seq_max=4, cache_bytes=1 << 26)
    expected = position_logits(engine, tokens)[-1:]
    engine.clear(0)
    engine.decode(tokens[:-1])
    engine.fork(0, 1, len(tokens) - 1)
    engine.load_sequence(2, engine.save_sequence(1))
    engine.release(0)
    assert engine.reuse_prefix(3, tokens, len(tokens) - 1).length == len(tokens) - 1
    for seq_id in (1, 2, 3):
        engine.decode(tokens[-1:], [seq_id], [True])
        assert_same_bits(engine.logits(), expected, f"sequence {seq_id}")
    engine.close()


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"devices": cpus(2), "split_mode": "tensor"},
        {"devices": cpus(3), "split_mode": "layer"},
        {**THREE, "tensor_split": (2, 1, 1)},
    ],
    ids=str,
)
def test_a_state_is_refused_by_another_split(hybrid_path: Path, split_model: Model, other: dict[str, Any]) -> None:
    engine = Engine(split_model, n_ctx=512)
    engine.decode(random_tokens(20, seed=25))
    state = engine.save_sequence(0)
    engine.close()
    model = Model(hybrid_path, **other)
    engine = Engine(model, n_ctx=512)
    with pytest.raises(InvalidArgument, match="saved with another"):
        engine.load_sequence(0, state)
    engine.close()
    model.close()


def test_a_state_is_taken_where_other_shares_give_each_rank_the_same_layers(hybrid_path: Path) -> None:
    tokens = random_tokens(20, seed=26)
    models = [Model(hybrid_path, devices=cpus(2), tensor_split=shares) for shares in ((1, 1), (5001, 4999))]
    engines = [Engine(model, n_ctx=512) for model in models]
    engines[0].decode(tokens)
    engines[1].load_sequence(0, engines[0].save_sequence(0))
    for engine in engines:
        engine.decode([7], [0], [True])
    assert_same_bits(engines[1].logits(), engines[0].logits(), "the state of another share")


def test_ranks_share_weights_and_caches_out(hybrid_path: Path) -> None:
    whole = Model(hybrid_path)
    for n_ranks, surplus in ((2, 1.15), (4, 1.3)):  # routers and norms are everywhere
        model = Model(hybrid_path, devices=cpus(n_ranks), split_mode="tensor")
        assert model.devices == cpus(n_ranks)
        assert sum(model.rank_bytes) <= surplus * whole.rank_bytes[0]
        assert max(model.rank_bytes) <= surplus * whole.rank_bytes[0] / n_ranks
        alone, split = (Engine(m, n_ctx=512) for m in (whole, model))
        assert split.kv_bytes == alone.kv_bytes
        alone.close()
        split.close()
        model.close()
    whole.close()


@pytest.mark.parametrize("placement", [THREE, {"devices": cpus(3)}], ids=["tensor", "layer"])
def test_embeddings_and_shifted_contexts_are_those_of_one_rank(tmp_path: Path, placement: dict[str, Any]) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", "qwen3", n_layer=3, n_head=24, n_head_kv=4, head_dim=16)
    embeddings, logits = [], []
    for model in (Model(path), Model(path, **placement)):
        engine = Engine(model, n_ctx=512, n_ubatch=16, **F32_CACHE)
        pool = HiddenPool("mean", model.n_embd)
        engine.embed([EmbeddingWork(0, PROMPT, pool)])
        embeddings.append(pool.values()[None])
        engine.shift(0, 5, 20)
        assert engine.length(0) == SCORES - 20
        engine.decode(PROMPT[:3])
        logits.append(engine.logits())
        engine.close()
        model.close()
    assert relative_difference(embeddings[1], embeddings[0]) <= EXACT
    assert relative_difference(logits[1], logits[0]) <= EXACT


# ---- overrides


def test_an_override_sends_tensors_to_one_rank_and_changes_no_result(hybrid_path: Path) -> None:
    placement = {"devices": cpus(2), "split_mode": "tensor"}
    plain = Computed(hybrid_path, F32_CACHE, **placement)
    moved = Computed(hybrid_path, F32_CACHE, **placement, tensor_overrides=[(r"\.ffn_(gate|up|down)\.", "CPU1")])
    feed_forward = 8 * 3 * 64 * 128 * 4
    assert moved.rank_bytes[1] - plain.rank_bytes[1] == plain.rank_bytes[0] - moved.rank_bytes[0] == feed_forward / 2
    assert relative_difference(moved.logits, plain.logits) <= EXACT
    on_host = Computed(hybrid_path, F32_CACHE, **placement, tensor_overrides=[(r"\.ffn_(gate|up|down)\.", "CPU")])
    assert on_host.rank_bytes == (feed_forward, *(n - feed_forward / 2 for n in plain.rank_bytes))
    assert relative_difference(on_host.logits, plain.logits) <= EXACT


def test_only_layers_with_tensors_elsewhere_are_computed_by_all(hybrid_path: Path) -> None:
    def layer_devices(**placement: Any) -> tuple[str | None, ...]:
        model = Model(hybrid_path, **placement)
        devices = model.layer_devices
        model.close()
        return devices

    assert layer_devices() == ("CPU",) * 8
    assert layer_devices(devices=cpus(2), device_layers=5) == ("CPU",) * 4 + ("CPU0",) * 2 + ("CPU1",) * 2
    single = [(r"blk\.0\.ffn", "CPU"), (r"blk\.2\.", "CPU"), (r"blk\.7\.ffn", "CPU0")]
    assert layer_devices(devices=cpus(2), tensor_overrides=single) == (
        None, "CPU0", "CPU", "CPU0", "CPU1", "CPU1", "CPU1", None,
    )  # fmt: skip
    assert layer_devices(devices=cpus(1), tensor_overrides=[("no_such_tensor", "CPU")]) == ("CPU0",) * 8
    assert layer_devices(devices=cpus(2), split_mode="tensor", device_layers=3) == ("CPU",) * 6 + (None,) * 2


def test_the_first_override_that_matches_counts(hybrid_path: Path) -> None:
    placement = {"devices": cpus(2), "split_mode": "tensor"}
    rules = [("ffn_", "CPU0"), ("ffn_", "CPU1")]
    first, second = (Model(hybrid_path, **placement, tensor_overrides=r).rank_bytes for r in (rules, rules[::-1]))
    assert first[0] > first[1]
    assert second[1] > second[0]


def test_the_output_matrix_can_be_sent_to_one_rank(hybrid_path: Path) -> None:
    placement = {"devices": cpus(3), "split_mode": "tensor"}
    plain = Computed(hybrid_path, F32_CACHE, **placement)
    moved = Computed(hybrid_path, F32_CACHE, **placement, tensor_overrides=[(r"^output\.", "CPU2")])
    assert moved.rank_bytes[2] > plain.rank_bytes[2]
    assert_same_bits(moved.logits, plain.logits, "rows of the output matrix are independent")


def test_experts_can_be_sent_to_one_rank(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "moe.gguf", "qwen3moe", n_expert=4)
    plain = Computed(path, F32_CACHE)
    experts = [(r"ffn_(up|down|gate)_exps", "CPU0")]
    split = Computed(path, F32_CACHE, devices=cpus(3), split_mode="tensor", tensor_overrides=experts)
    assert relative_difference(split.logits, plain.logits) <= EXACT
    assert split.rank_bytes[0] > 3 * max(split.rank_bytes[1:])


# ---- what cannot be


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"devices": ["GPU0"]}, "device 'GPU0' is not there; expected one of CPU, CPU0, CPU1"),
        ({"devices": ["CUDA999"]}, "device 'CUDA999' "),  # then what is there, or why there is none
        ({"devices": ["CPU0", "CPU1", "CPU0"]}, "device 'CPU0' is named twice"),
        ({"devices": ["CPU0", "CPU1"], "split_mode": "row"}, "split mode 'row' is not supported; 'tensor'"),
        ({"split_mode": "rows"}, "split mode 'rows' is unknown; expected none, layer or tensor"),
        ({"devices": ["CPU0", "CPU1"], "split_mode": "none", "main_gpu": 2}, "main device is 2, expected 0 to 1"),
        ({"devices": ["CPU0"], "tensor_split": [1, 1]}, "the tensor split has a share for device 2 of 1"),
        ({"devices": ["CPU0", "CPU1"], "tensor_split": [0, 0]}, "the shares of all ranks are zero"),
        ({"devices": ["CPU0", "CPU1"], "tensor_split": [1, -1]}, "the share of a rank is -1"),
        ({"tensor_overrides": [("x", "CUDA0")]}, "tensor override 'x': device 'CUDA0' is not one of CPU"),
        ({"devices": [f"CPU{i}" for i in range(8)], "device_layers": 1}, "9 devices, the host one of them"),
        ({"tensor_overrides": [("(x", "CPU")]}, r"tensor override '(x': not a regular expression"),
        (
            {**THREE, "tensor_overrides": [("ffn_gate", "CPU1")]},
            "the tensor overrides part blk.0.ffn_down.weight from blk.0.ffn_gate.weight",
        ),
    ],
    ids=str,
)
def test_a_placement_that_cannot_be_is_refused_by_name(
    hybrid_path: Path, placement: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        Model(hybrid_path, **placement)


def test_importance_is_not_collected_in_parts(split_model: Model) -> None:
    with pytest.raises(InvalidArgument, match="importance is collected on one device"):
        Engine(split_model, n_ctx=256, collect_importance=True)


@pytest.mark.parametrize("main_gpu", [0, 1])
def test_one_of_several_devices_has_it_all_without_a_split(hybrid_path: Path, main_gpu: int) -> None:
    model = Model(hybrid_path, devices=cpus(2), split_mode="none", main_gpu=main_gpu)
    assert model.devices == (f"CPU{main_gpu}",)
    model.close()
