"""EAGLE-3 drafters: shares of the candidates and drafts against a NumPy restatement in f64, what may not change them,
and texts that they may not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pyllama import InvalidArgument, Llama, ModelError
from pyllama._engine import Draft, DraftOrder, Engine, MemoryNeeds, Model, Sampler, Speculator, Work
from pyllama.speculation import SpeculationOptions
from support.decoded_file import Array
from support.dflash_forward import tapped_inputs
from support.draft_rounds import drafted, undrafted
from support.eagle3_forward import Eagle3Forward
from support.llama_forward import linear_inputs
from support.qwen35_forward import Qwen35Forward
from support.tiny_eagle3 import write_tiny_eagle3
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama
from support.tiny_models import write_tiny_model

TARGET_LAYERS = (1, 3, 2)
TEXT = np.random.default_rng(27).integers(3, 290, 300).tolist()
FEWER = sorted(np.random.default_rng(3).choice(300, 120, replace=False).tolist())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recurrent = {"qwen35.attention.recurrent_layers": [True, True, True, False]}
    return write_tiny_hybrid(tmp_path_factory.mktemp("eagle3") / "target.gguf", n_layer=4, metadata=recurrent)


@pytest.fixture(scope="module")
def streams(target: Path) -> list[Array]:
    return layer_inputs(target, TEXT)


def layer_inputs(target: Path, tokens: list[int]) -> list[Array]:
    """The inputs of the target's layers, and behind them its output."""
    forward = Qwen35Forward(target)
    *inputs, last = forward.layer_inputs(tokens)
    return [*inputs, forward.norm(last, "output_norm.weight")]


def oracle(target: Path, drafter: Path) -> Eagle3Forward:
    weights = Qwen35Forward(target).weights
    return Eagle3Forward(drafter, weights["token_embd.weight"], weights["output.weight"])


def open_engine(target: Path, drafter: Path | None, **settings: Any) -> Engine:
    settings = {"n_ctx": 1024, "n_threads": 1, "type_k": "f32", "type_v": "f32", "swa_full": False} | settings
    return Engine(Model(target, drafter=drafter), **settings)


def append(engine: Engine, tokens: list[int], seq_id: int = 0, cut: int = 100) -> None:
    for at in range(0, len(tokens), cut):
        engine.step([Work(seq_id, tokens[at : at + cut])])


def drawn(engine: Engine, last: int, n_draft: int = 5, seq_id: int = 0) -> Draft:
    """With what each token was drawn from: the ten best of the drafter's logits."""
    speculator = Speculator(engine, ("draft-eagle3",), draft_n_max=n_draft, draft_samples=True)
    return speculator.draft([DraftOrder(seq_id, last, n_draft, 1.0, 5)])[0]


def distance(found: Draft, expected: list[Array]) -> float:
    """The largest of the shares; infinite where other tokens are among the ten best."""
    worst = 0.0
    for proposal, logits in zip(found.proposals, expected, strict=True):
        best = np.argsort(-logits, kind="stable")[:10]
        shares = np.exp(logits[best] - logits[best].max())
        shares /= shares.sum()
        if sorted(token for token, _ in proposal) != sorted(best.tolist()):
            return np.inf
        of_token = dict(proposal)
        worst = max(worst, *(abs(of_token[int(token)] - share) for token, share in zip(best, shares, strict=True)))
    return worst


def expected_logits(target: Path, drafter: Path, streams: list[Array], n: int, draft: Draft) -> list[Array]:
    forward = oracle(target, drafter)
    taps = tapped_inputs([stream[:n] for stream in streams], forward.keys["target_layers"])
    return forward.draft_logits(TEXT[:n], taps, TEXT[n], draft.tokens[:-1])


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "the output among the layers": {"target_layers": (4, 0, 2)},
    "the normed state is the stream": {"norm_before_residual": True},
    "normed before they are fused": {"norm_before_fc": True},
    "own tables, wider": {"own_embeddings": True, "own_head": True, "n_embd": 96},
    "smaller vocabulary": {"draft_to_target": FEWER},
    "halves that overlap": {"own_embeddings": True, "own_head": True, "n_embd": 80},
    "divisors of frequencies": {"rope_divisors": True},
}


@pytest.mark.parametrize("n", [1, 2, 5, 290])
@pytest.mark.parametrize("variant", VARIANTS)
def test_shares_of_candidates_are_those_of_the_formulas(
    target: Path, streams: list[Array], tmp_path: Path, variant: str, n: int
) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", **({"target_layers": TARGET_LAYERS} | VARIANTS[variant]))
    engine = open_engine(target, drafter)
    append(engine, TEXT[:n])
    draft = drawn(engine, TEXT[n])
    assert len(draft.tokens) == 5
    assert distance(draft, expected_logits(target, drafter, streams, n, draft)) < 1e-3


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_smaller_caches_change_little(tmp_path: Path, kind: str) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4, n_head=2, n_head_kv=1)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    found = []
    for cache in ("f32", kind):
        engine = open_engine(target, drafter, type_k=cache, type_v=cache)
        append(engine, TEXT[:200])
        found.append(dict(drawn(engine, TEXT[200], n_draft=1).proposals[0]))
    most = max(abs(found[1].get(token, 0.0) - share) for token, share in found[0].items())
    assert most < {"f16": 2e-3, "q8_0": 0.03}[kind]


FAULTS: dict[str, dict[str, Any]] = {
    "another layer": {"eagle3.target_layers": [1, 3, 0]},
    "another order of layers": {"eagle3.target_layers": [3, 1, 2]},
    "another stream": {"eagle3.norm_before_residual": True},
    "another base of angles": {"eagle3.rope.freq_base": 20000.0},
    "another epsilon": {"eagle3.attention.layer_norm_rms_epsilon": 0.1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_a_planted_fault(target: Path, streams: list[Array], tmp_path: Path, fault: str) -> None:
    good = write_tiny_eagle3(tmp_path / "good.gguf", target_layers=TARGET_LAYERS)
    bad = write_tiny_eagle3(tmp_path / "bad.gguf", target_layers=TARGET_LAYERS, metadata=FAULTS[fault])
    engine = open_engine(target, bad)
    append(engine, TEXT[:50])
    draft = drawn(engine, TEXT[50])
    assert distance(draft, expected_logits(target, good, streams, 50, draft)) > 0.01


def test_the_comparison_sees_a_state_of_another_token(target: Path, streams: list[Array], tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    engine = open_engine(target, drafter)
    append(engine, TEXT[:50])
    draft = drawn(engine, TEXT[50])
    swapped = [stream.copy() for stream in streams]
    for stream in swapped:
        stream[[20, 21]] = stream[[21, 20]]
    assert distance(draft, expected_logits(target, drafter, streams, 50, draft)) < 1e-3
    assert distance(draft, expected_logits(target, drafter, swapped, 50, draft)) > 1e-3


@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_drafts_do_not_depend_on_company_cuts_or_history(tmp_path: Path, architecture: str, kind: str) -> None:
    """Chunks of any size, forks, other sequences, drafts before, tokens that were taken back: the same bits."""
    write = write_tiny_llama if architecture == "llama" else write_tiny_hybrid
    target = write(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    alone = open_engine(target, drafter, type_k=kind, type_v=kind)
    append(alone, TEXT[:280])
    expected = drawn(alone, 5)
    engine = open_engine(target, drafter, n_ctx=4096, n_seq_max=3, type_k=kind, type_v=kind)
    append(engine, TEXT[:270], cut=7)
    append(engine, TEXT[50:170], 1)
    if architecture == "llama":
        append(engine, TEXT[:30])
        drawn(engine, 9)
        engine.truncate(0, 270)
    engine.fork(0, 2, 270)
    engine.step([Work(0, TEXT[270:280]), Work(1, TEXT[:3]), Work(2, TEXT[270:280])])
    for _ in range(2):  # a draft leaves no trace
        for seq_id in (0, 2):
            assert drawn(engine, 5, seq_id=seq_id) == expected
    assert [engine.length(seq_id) for seq_id in range(3)] == [280, 123, 280]


def test_a_sequence_is_taken_up_again_at_any_length(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    cold, warm = open_engine(target, drafter), open_engine(target, drafter)
    append(warm, TEXT)
    for length in (299, 257, 256, 100, 2, 1):
        warm.truncate(0, length)
        append(warm, [7, 8])
        cold.clear(0)
        append(cold, [*TEXT[:length], 7, 8])
        assert drawn(warm, 5) == drawn(cold, 5), length
        warm.truncate(0, length)


def test_a_prefix_from_host_memory_and_a_saved_sequence_bring_the_states(tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    engine = open_engine(target, drafter, cache_bytes=1 << 26, n_seq_max=2, n_ctx=2048)
    append(engine, TEXT)
    cold, saved = drawn(engine, 5), engine.save_sequence(0)
    engine.release(0)
    reuse = engine.reuse_prefix(1, TEXT, len(TEXT))
    assert reuse.length >= 256
    append(engine, TEXT[reuse.length :], 1)
    assert drawn(engine, 5, seq_id=1) == cold
    other = open_engine(target, drafter)
    other.load_sequence(0, saved)
    assert drawn(other, 5) == cold


def test_after_a_shift_keys_were_turned_and_states_were_not(tmp_path: Path) -> None:
    """The layer sees differences of positions, so that rows which are gone are the only difference."""
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=(4, 4, 4))
    engine = open_engine(target, drafter)
    append(engine, TEXT[:80])
    engine.shift(0, 10, 30)
    draft = drawn(engine, 9)
    weights = {tensor.name: tensor.data.astype(np.float64) for tensor in gguf.GGUFReader(target).tensors}
    forward = Eagle3Forward(drafter, weights["token_embd.weight"], weights["output.weight"])
    taps = np.tile(linear_inputs(target, np.array(TEXT[:80]))["output.weight"], 3)
    found = [
        distance(draft, forward.draft_logits(TEXT[:80], taps, 9, draft.tokens[:-1], dropped))
        for dropped in (range(10, 40), range(11, 40))
    ]
    assert found[0] < 1e-3 < 0.01 < found[1]


def test_a_plan_counts_the_drafter(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    for file in (None, drafter):
        (need,) = MemoryNeeds(target, drafter=file).of(n_ctx=512)
        model = Model(target, drafter=file)
        assert model.rank_bytes[0] <= need.weights <= 1.1 * model.rank_bytes[0] + 20_000
        assert need.kv == Engine(model, n_ctx=512, n_threads=1).kv_bytes


@pytest.mark.parametrize(("kind", "bits", "state_bits"), [("f32", 32, 32), ("q8_0", 8.5, 16), ("q4_0", 4.5, 16)])
def test_states_take_two_bytes_beside_smaller_keys(tmp_path: Path, kind: str, bits: float, state_bits: int) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4, n_head=2, n_head_kv=1)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    sizes = [open_engine(target, file, type_k=kind, type_v=kind).kv_bytes for file in (drafter, None)]
    assert sizes[0] - sizes[1] == 1024 * (2 * 64 * bits + 64 * state_bits) / 8  # K and V of 2 heads of 32; 64 features


def test_drafts_are_those_of_the_formulas_round_after_round(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    _, rounds = drafted(open_engine(target, drafter), "draft-eagle3", {0: TEXT[:20]}, 60, most=4, temperature=0.0)
    forward, streams = oracle(target, drafter), layer_inputs(target, rounds[-1].history)
    assert len(rounds) > 20
    for each in rounds:
        taps = tapped_inputs([stream[: len(each.history)] for stream in streams], TARGET_LAYERS)
        assert each.draft == forward.draft(each.history, taps, each.last, 4)


def test_drafts_go_on_after_rounds_that_another_drafter_drafted_for(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    plain = undrafted(open_engine(target, None), TEXT[:20], 40, temperature=0.0)
    text = TEXT[:20] + plain
    engine, sampler = open_engine(target, drafter), Sampler(300, temperature=0.0)
    append(engine, TEXT[:20])
    speculator = Speculator(engine, ("draft-eagle3",), draft_n_max=4)
    speculator.begin(0)
    forward, inputs = oracle(target, drafter), layer_inputs(target, text)
    for n_right in (3, 0, 1, 4, 2):
        at = engine.length(0)
        foreign = [*text[at + 1 : at + 1 + n_right], 9, 9][:4]  # `n_right` of it stand
        outputs = engine.step([Work(0, [text[at]], sampler, draft=foreign)])
        assert len(outputs) == n_right + 1
        at = engine.length(0)
        taps = tapped_inputs([stream[:at] for stream in inputs], TARGET_LAYERS)
        (draft,) = speculator.draft([DraftOrder(0, text[at], 4)])
        assert draft.tokens == forward.draft(text[:at], taps, text[at], 4)


@pytest.mark.parametrize("n_sequences", [1, 4])
@pytest.mark.parametrize("weight_type", ["f32", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35", "qwen35moe"])
def test_texts_are_those_without_drafts(tmp_path: Path, architecture: str, weight_type: str, n_sequences: int) -> None:
    path = tmp_path / "target.gguf"
    if architecture == "llama":
        write_tiny_llama(path, n_layer=4, weight_type=weight_type)
    elif architecture.startswith("qwen35"):
        write_tiny_hybrid(path, architecture, n_layer=4, weight_type=weight_type)
    else:
        write_tiny_model(path, architecture, n_layer=4, weight_type=weight_type)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=(1, 4, 0), weight_type=weight_type)
    prompts = {seq_id: TEXT[9 * seq_id : 9 * seq_id + 230] for seq_id in range(n_sequences)}
    settings: dict[str, Any] = {"type_k": "f16", "type_v": "f16", "n_ctx": 4096, "n_seq_max": 4}
    engine, plain = (open_engine(path, file, **settings) for file in (drafter, None))
    texts, rounds = drafted(engine, "draft-eagle3", prompts, 40, most=5, temperature=0.0)
    assert {len(each.draft) for each in rounds} == {5}
    for seq_id, prompt in prompts.items():
        assert texts[seq_id] == undrafted(plain, prompt, 40, temperature=0.0)


def test_drawn_drafts_repeat_with_the_seed(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS, draft_to_target=FEWER)
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "seed": 11}
    runs = [
        drafted(open_engine(target, drafter), "draft-eagle3", {0: TEXT[:50]}, 40, most=4, samples=True, **sampling)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert {token for each in runs[0][1] for token in each.draft} <= set(FEWER)


def test_low_confidence_ends_a_draft(target: Path, streams: list[Array], tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    engine = open_engine(target, drafter)
    append(engine, TEXT[:40])
    taps = tapped_inputs([stream[:40] for stream in streams], TARGET_LAYERS)
    sure = []
    for logits in oracle(target, drafter).draft_logits(TEXT[:40], taps, TEXT[40], [None] * 4):
        best = np.sort(logits)[-10:]
        sure.append(float(1 / np.exp(best - best.max()).sum()))
    for p_min in (0.0, *(value + step for value in sure for step in (-1e-3, 1e-3))):
        speculator = Speculator(engine, ("draft-eagle3",), draft_n_max=5, draft_p_min=p_min)
        (draft,) = speculator.draft([DraftOrder(0, TEXT[40], 5)])
        assert len(draft.tokens) == next((i for i in range(5) if sure[i] < p_min), 5)


@pytest.mark.parametrize("own", [{}, {"own_head": True}, {"draft_to_target": FEWER}], ids=str)
@pytest.mark.parametrize("split_mode", ["layer", "tensor"])
def test_beside_a_model_on_several_devices_drafts_are_those_beside_one(
    tmp_path: Path, split_mode: str, own: dict[str, Any]
) -> None:
    target = write_tiny_llama(tmp_path / "target.gguf", n_layer=4)
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=(1, 4, 2), **own)
    one = open_engine(target, drafter)
    placement: dict[str, Any] = {"devices": ["CPU0", "CPU1"], "split_mode": split_mode}
    settings: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "type_k": "f32", "type_v": "f32"}
    several, plain = (Engine(Model(target, drafter=file, **placement), **settings) for file in (drafter, None))
    for engine in (one, several):
        append(engine, TEXT[:80])
    found, expected = drawn(several, 9), drawn(one, 9)
    assert found.tokens == expected.tokens
    for shares, others in zip(found.proposals, expected.proposals, strict=True):
        assert [token for token, _ in shares] == [token for token, _ in others]
        np.testing.assert_allclose([share for _, share in shares], [share for _, share in others], atol=1e-3)
    several.clear(0)
    texts, rounds = drafted(several, "draft-eagle3", {0: TEXT[:50]}, 24, most=4, temperature=0.0)
    assert {len(each.draft) for each in rounds} == {4}
    assert texts[0] == undrafted(plain, TEXT[:50], 24, temperature=0.0)


def test_llama_drafts_with_the_type_that_the_file_says(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    inferred = SpeculationOptions(draft_model=str(drafter), infers_type=True).resolved()
    assert inferred.types == ("draft-eagle3",)
    assert not inferred.draws
    texts = []
    for draft_model in (None, drafter, inferred):
        llama = Llama(str(target), n_ctx=512, n_threads=1, draft_model=draft_model, verbose=False)
        texts.append(llama("the world", max_tokens=40, temperature=0.0)["choices"][0]["text"])
        llama.close()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden": 32}, "target's width is 32, the model's 64"),
        ({"n_embd": 96}, "width is 96, the model's 64"),
        ({"target_layers": (1, 5, 2)}, "layer 5"),
        ({"target_layers": (1, 2)}, "has 2 layers, expected three"),
        ({"n_layer": 2}, "expected one layer"),
        ({"metadata": {"eagle3.norm_before_fc": True}}, "enc.output_norm"),
        ({"metadata": {"eagle3.attention.head_count_kv": 3}}, "do not make an attention layer"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", **({"target_layers": TARGET_LAYERS} | changes))
    with pytest.raises(ModelError, match=message):
        Model(target, drafter=drafter)


def test_wrong_uses_are_said(target: Path, tmp_path: Path) -> None:
    drafter = write_tiny_eagle3(tmp_path / "drafter.gguf", target_layers=TARGET_LAYERS)
    with pytest.raises(ModelError, match="drafter"):
        Model(drafter)
    engine = open_engine(target, drafter)
    for kind, message in (
        ("draft-mtp", "needs a model with a block"),
        ("draft-dflash", "needs a DFlash drafter"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Speculator(engine, (kind,))
    with pytest.raises(InvalidArgument, match="needs an EAGLE-3 drafter"):
        Speculator(open_engine(target, None), ("draft-eagle3",))
    assert drawn(engine, 5).tokens == []  # nothing to go on from
    with pytest.raises(InvalidArgument, match="draft-mtp and draft-eagle3"):
        _ = SpeculationOptions(("draft-mtp", "draft-eagle3"), str(drafter)).model_arguments
