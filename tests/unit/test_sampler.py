"""The sampler chain against hand-computed values, a plain numpy version of it, and the expected distributions.

Log probabilities of raw logits: test_log_probabilities.py.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from unit.sampling_oracle import Settings, run_chain, uniforms

from pyllama._engine import Sampler
from pyllama.errors import InvalidArgument, PyllamaError

STAGES = ("penalties", "top_k", "top_p", "min_p", "temperature")


def chain(n_vocab: int, *stages: str, **options: Any) -> Any:
    return Sampler(n_vocab, samplers=stages, **{"seed": 1, **options})


def after(sampler: Any, probabilities: Sequence[float]) -> list[tuple[int, float]]:
    """Candidates after one draw from the given distribution."""
    sampler.sample(np.log(np.array(probabilities, dtype=np.float32)))
    return sampler.candidates()


# Expected values


@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        ("top_k", {"top_k": 1}, {3: 1.0}),
        ("top_k", {"top_k": 3}, {3: 4 / 9, 2: 3 / 9, 1: 2 / 9}),
        ("top_k", {"top_k": 9}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_k", {"top_k": 0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_k", {"top_k": -5}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_p", {"top_p": 0.0}, {3: 1.0}),
        ("top_p", {"top_p": -1.0}, {3: 1.0}),
        ("top_p", {"top_p": 0.0, "min_keep": 2}, {3: 4 / 7, 2: 3 / 7}),
        ("top_p", {"top_p": 0.7}, {3: 0.571429, 2: 0.428571}),
        ("top_p", {"top_p": 0.8}, {3: 4 / 9, 2: 3 / 9, 1: 2 / 9}),
        ("top_p", {"top_p": 1.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("min_p", {"min_p": 0.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("min_p", {"min_p": 0.26}, {3: 0.4 / 0.9, 2: 0.3 / 0.9, 1: 0.2 / 0.9}),
        ("min_p", {"min_p": 0.51}, {3: 0.4 / 0.7, 2: 0.3 / 0.7}),
        ("min_p", {"min_p": 0.51, "min_keep": 3}, {3: 4 / 9, 2: 3 / 9, 1: 2 / 9}),
        ("min_p", {"min_p": 1.05}, {3: 1.0}),
        ("temperature", {"temperature": 0.0}, {3: 1.0}),
        ("temperature", {"temperature": 1.0}, {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("temperature", {"temperature": 0.5}, {3: 16 / 30, 2: 9 / 30, 1: 4 / 30, 0: 1 / 30}),
    ],
)
def test_one_stage_gives_the_expected_probabilities(
    stage: str, options: dict[str, Any], expected: dict[int, float]
) -> None:
    found = after(chain(4, stage, **options), [0.1, 0.2, 0.3, 0.4])
    assert [token for token, _ in found] == list(expected)
    assert [p for _, p in found] == pytest.approx(list(expected.values()), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "history", "expected"),
    [
        ({"repeat_penalty": 50.0}, [0], [0.0, 0.25, 0.25, 0.25, 0.25]),
        ({"repeat_penalty": 50.0}, [0, 1, 2, 0, 0], [0.0, 0.0, 0.0, 0.5, 0.5]),
        ({"frequency_penalty": 5.0, "presence_penalty": 5.0}, [0], [0.000011] + [0.249997] * 4),
        ({"frequency_penalty": 1.0}, [0, 0, 1], [0.038632, 0.105012, 0.285452, 0.285452, 0.285452]),
        ({"presence_penalty": 1.0}, [0, 0, 1], [0.098475, 0.098475, 0.267683, 0.267683, 0.267683]),
        ({"repeat_penalty": 2.0, "repeat_last_n": 0}, [0, 1], [0.2] * 5),
    ],
)
def test_penalties_give_the_expected_probabilities(
    options: dict[str, Any], history: list[int], expected: list[float]
) -> None:
    sampler = chain(5, "penalties", **options)
    sampler.accept(history)
    found = dict(after(sampler, [0.2] * 5))
    assert [found.get(token, 0.0) for token in range(5)] == pytest.approx(expected, abs=1e-5)


def test_repeat_penalty_divides_positive_and_multiplies_other_logits() -> None:
    sampler = chain(3, "penalties", repeat_penalty=2.0)
    sampler.accept([0, 1])
    sampler.sample(np.array([1.0, -1.0, 0.0], dtype=np.float32))
    found = dict(sampler.candidates())
    assert found[0] / found[2] == pytest.approx(math.exp(0.5), rel=1e-5)
    assert found[1] / found[2] == pytest.approx(math.exp(-2.0), rel=1e-5)


# The numpy version


def random_settings(rng: np.random.Generator, n_vocab: int, stages: tuple[str, ...]) -> Settings:
    return Settings(
        stages=stages,
        temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=int(rng.choice([0, 1, 5, 40, n_vocab // 2 + 1, n_vocab + 7])),
        top_p=float(rng.choice([0.0, 0.5, 0.95, 0.99, 1.0])),
        min_p=float(rng.choice([0.0, 0.001, 0.05, 0.5, 1.5])),
        min_keep=int(rng.choice([0, 0, 1, 3, 60])),
        repeat_last_n=int(rng.choice([0, 8, 64])),
        repeat_penalty=float(rng.choice([1.0, 1.3, 0.7])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.25])),
        logit_bias=tuple((int(t), float(b)) for t, b in [(0, 1.5), (2, -math.inf), (0, -0.25)][: rng.integers(0, 4)]),
    )


def random_logits(rng: np.random.Generator, n_vocab: int) -> np.ndarray:
    logits = rng.normal(0.0, rng.choice([0.01, 2.0, 6.0]), n_vocab).astype(np.float32)
    if rng.integers(0, 2):
        logits = np.round(logits * 4) / 4  # many ties
    if rng.integers(0, 3) == 0:
        logits[rng.integers(0, n_vocab, n_vocab // 4)] = -np.inf
        logits[rng.integers(3, n_vocab)] = 0.5
    return logits


def engine_sampler(n_vocab: int, settings: Settings, seed: int) -> Any:
    return Sampler(
        n_vocab,
        seed=seed,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        min_keep=settings.min_keep,
        repeat_last_n=settings.repeat_last_n,
        repeat_penalty=settings.repeat_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        logit_bias=settings.logit_bias,
        samplers=settings.stages,
    )


def compare_with_oracle(rng: np.random.Generator, n_vocab: int, stages: tuple[str, ...], seed: int, steps: int) -> None:
    settings = random_settings(rng, n_vocab, stages)
    history = [int(t) for t in rng.integers(0, min(n_vocab, 30), rng.integers(0, 100))]
    sampler = engine_sampler(n_vocab, settings, seed)
    sampler.accept(history)
    for step, uniform in enumerate(uniforms(seed, steps)):
        logits = random_logits(rng, n_vocab)
        token, candidates = run_chain(logits, history, settings, uniform)
        where = f"seed {seed}, step {step}, n_vocab {n_vocab}, {settings}"
        assert sampler.sample(logits) == token, where
        found = sampler.candidates()
        assert len(found) == len(candidates), where
        np.testing.assert_allclose([p for _, p in found], [p for _, p in candidates], rtol=2e-6, err_msg=where)
        assert {t for t, _ in found} == {t for t, _ in candidates}, where
        sampler.accept([token])
        history.append(token)


@pytest.mark.parametrize("first", STAGES)
def test_every_order_of_all_stages_equals_the_numpy_version(first: str) -> None:
    for number, stages in enumerate(itertools.permutations(STAGES)):
        if stages[0] != first:
            continue
        for n_vocab in (7, 350):
            seed = 1000 * n_vocab + number
            compare_with_oracle(np.random.default_rng(seed), n_vocab, stages, seed, 8)


@pytest.mark.parametrize("seed", range(12))
def test_subsets_and_repeated_stages_equal_the_numpy_version(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        stages = tuple(rng.choice(STAGES, rng.integers(0, 8)))
        compare_with_oracle(rng, int(rng.choice([4, 17, 600])), stages, seed, 4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "stages",
    [
        STAGES,
        ("top_p",),
        ("min_p", "top_p", "top_k"),
        ("temperature", "top_p"),
        ("top_k", "penalties", "top_p", "temperature"),
        ("min_p", "top_k", "penalties", "top_k"),
        (),
    ],
)
def test_large_vocabularies_equal_the_numpy_version(stages: tuple[str, ...], seed: int) -> None:
    """Lists of thousands take other paths than short ones: partial selection, a histogram, a radix sort."""
    compare_with_oracle(np.random.default_rng(seed), 9001, stages, seed, 4)


# Random numbers


def test_draws_follow_mt19937_with_the_documented_conversion_to_f64() -> None:
    n_vocab = 1000
    sampler = chain(n_vocab, seed=42)
    uniform_row = np.zeros(n_vocab, dtype=np.float32)
    found = [sampler.sample(uniform_row) for _ in range(300)]
    assert found == [math.ceil(u * n_vocab) - 1 for u in uniforms(42, 300)]


def test_a_single_candidate_still_consumes_a_draw() -> None:
    sampler = chain(8, seed=3)
    only_one = np.full(8, -np.inf, dtype=np.float32)
    only_one[5] = 2.0
    row = np.zeros(8, dtype=np.float32)
    assert sampler.sample(only_one) == 5
    assert [sampler.sample(row) for _ in range(20)] == [math.ceil(u * 8) - 1 for u in uniforms(3, 21)[1:]]


def test_the_same_seed_gives_the_same_stream_and_another_seed_another() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 1, (50, 100)).astype(np.float32)
    streams = [[s.sample(row) for row in rows] for s in (Sampler(100, seed=seed) for seed in (7, 7, 8))]
    assert streams[0] == streams[1]
    assert streams[0] != streams[2]


def test_reset_restarts_the_stream_and_forgets_the_history() -> None:
    rows = np.random.default_rng(1).normal(0, 1, (40, 50)).astype(np.float32)
    sampler = Sampler(50, seed=9, repeat_penalty=1.5, presence_penalty=1.0)

    def stream() -> list[int]:
        tokens = []
        for row in rows:
            tokens.append(sampler.sample(row))
            sampler.accept(tokens[-1:])
        return tokens

    first = stream()
    assert stream() != first
    sampler.reset()
    assert stream() == first


def test_a_clone_continues_the_stream_on_its_own() -> None:
    rows = np.random.default_rng(2).normal(0, 1, (30, 50)).astype(np.float32)
    sampler = Sampler(50, seed=9, repeat_penalty=1.5)
    sampler.accept([1, 2, 3])
    for row in rows[:10]:
        sampler.sample(row)
    clone = sampler.clone()
    expected = [sampler.sample(row) for row in rows]
    sampler.accept([4] * 64)
    assert [clone.sample(row) for row in rows] == expected


def test_the_seed_in_use_is_reported() -> None:
    assert Sampler(4, seed=123).seed == 123
    drawn = {Sampler(4).seed for _ in range(4)}
    assert len(drawn) > 1
    sampler = Sampler(1000, samplers=())
    again = Sampler(1000, samplers=(), seed=sampler.seed)
    row = np.zeros(1000, dtype=np.float32)
    assert [sampler.sample(row) for _ in range(5)] == [again.sample(row) for _ in range(5)]


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        ((), {}),
        (("top_k",), {"top_k": 6}),
        (("temperature",), {"temperature": 1.7}),
        (("top_p", "temperature"), {"top_p": 0.85, "temperature": 0.6}),
        (("min_p",), {"min_p": 0.3}),
    ],
)
def test_drawn_tokens_have_the_distribution_of_the_candidates(stages: tuple[str, ...], options: dict[str, Any]) -> None:
    """Pearson's chi-square with a fixed seed; a right sampler exceeds the bound with probability 1e-4 per case."""
    draws = 20_000
    sampler = chain(6, *stages, seed=2024, **options)
    logits = np.log(np.array([0.05, 0.3, 0.1, 0.25, 0.1, 0.2], dtype=np.float32))
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=6)
    expected = dict(sampler.candidates())
    assert sum(expected.values()) == pytest.approx(1, abs=1e-6)
    assert all((counts[token] > 0) == (token in expected) for token in range(6))
    statistic = sum((counts[token] - draws * p) ** 2 / (draws * p) for token, p in expected.items())
    upper_quantile = {2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74}  # 1 - 1e-4, by degrees of freedom
    assert statistic < upper_quantile[len(expected) - 1]


# Greedy, ties, bans


@pytest.mark.parametrize("order", [STAGES, STAGES[::-1], ("temperature",), ("top_p", "temperature", "top_k")])
def test_temperature_zero_takes_the_largest_logit_and_the_smaller_id_of_equals(order: tuple[str, ...]) -> None:
    rng = np.random.default_rng(5)
    for n_vocab in (1, 2, 15, 16, 17, 31, 33, 1000):
        logits = np.round(rng.normal(0, 2, n_vocab)).astype(np.float32)
        sampler = Sampler(n_vocab, temperature=0.0, samplers=order)
        assert sampler.sample(logits) == int(np.argmax(logits))
        assert sampler.candidates() == [(int(np.argmax(logits)), 1.0)]


def test_negative_zero_ties_with_zero() -> None:
    logits = np.array([-1.0, -0.0, 0.0, -0.0], dtype=np.float32)
    for top_k in (1, 2, 3):
        sampler = chain(4, "top_k", top_k=top_k)
        sampler.sample(logits)
        assert [token for token, _ in sampler.candidates()] == [1, 2, 3][:top_k]


def test_greedy_looks_at_penalised_and_biased_logits() -> None:
    logits = np.array([3.0, 2.9, 0.0, 0.0], dtype=np.float32)
    sampler = Sampler(4, temperature=0.0, presence_penalty=1.0, logit_bias=[(3, 2.5)])
    taken = []
    for _ in range(3):
        taken.append(sampler.sample(logits))
        sampler.accept(taken[-1:])
    assert taken == [0, 1, 3]


def test_greedy_respects_penalties_that_come_after_a_truncation() -> None:
    logits = np.array([3.0, 2.9, 0.0], dtype=np.float32)
    sampler = chain(3, "top_k", "penalties", "temperature", top_k=1, presence_penalty=9.0, temperature=0.0)
    sampler.accept([0])
    assert sampler.sample(logits) == 0
    sampler = chain(3, "top_k", "penalties", "temperature", top_k=2, presence_penalty=9.0, temperature=0.0)
    sampler.accept([0])
    assert sampler.sample(logits) == 1


def test_biases_of_one_token_add_up_and_unknown_ids_are_ignored() -> None:
    sampler = chain(2, logit_bias=[(0, 1.0), (0, 0.5), (2, 100.0), (-1, 100.0)])
    found = dict(after(sampler, [0.5, 0.5]))
    assert found[0] / found[1] == pytest.approx(math.exp(1.5), rel=1e-5)


@pytest.mark.parametrize("stages", [(), STAGES, STAGES[::-1], ("top_k",), ("top_p",), ("min_p",)])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 100.0])
def test_banned_tokens_are_never_drawn(stages: tuple[str, ...], temperature: float) -> None:
    logits = np.full(100, -np.inf, dtype=np.float32)
    logits[[10, 50, 90]] = [5.0, 4.9, 4.8]
    sampler = Sampler(
        100, seed=4, temperature=temperature, repeat_penalty=1.1, frequency_penalty=-2.0, samplers=stages,
        logit_bias=[(10, -math.inf)],
    )  # fmt: skip
    sampler.accept([10, 11, 12])
    for _ in range(50):
        assert sampler.sample(logits) in (50, 90)
        assert {token for token, _ in sampler.candidates()} <= {50, 90}


def test_a_row_without_an_allowed_token_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="banned"):
        Sampler(3, logit_bias=[(i, -math.inf) for i in range(3)]).sample(np.zeros(3, dtype=np.float32))
    with pytest.raises(InvalidArgument, match="banned"):
        Sampler(3).sample(np.full(3, -np.inf, dtype=np.float32))


@pytest.mark.parametrize("position", [0, 17, 98, 99])
@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, r"\+inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_and_infinite_logits_are_errors_that_name_the_token(
    position: int, value: float, name: str, temperature: float
) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[position] = value
    sampler = Sampler(100, temperature=temperature)
    with pytest.raises(PyllamaError, match=f"{name}.*{position}") as caught:
        sampler.sample(logits)
    assert not isinstance(caught.value, InvalidArgument)
    assert sampler.candidates() == []
    logits[position] = 0
    assert 0 <= sampler.sample(logits) < 100


# History


def test_penalties_see_only_the_last_accepted_tokens() -> None:
    sampler = chain(4, "penalties", repeat_last_n=3, presence_penalty=50.0)
    sampler.accept([0, 1, 2, 3, 3])
    assert {token for token, _ in after(sampler, [0.25] * 4) if _ > 1e-6} == {0, 1}
    sampler.accept([0])
    assert {token for token, _ in after(sampler, [0.25] * 4) if _ > 1e-6} == {1, 2}
    sampler.accept([1, 1, 1, 1, 1])
    assert {token for token, _ in after(sampler, [0.25] * 4) if _ > 1e-6} == {0, 2, 3}


def test_accepting_at_once_or_one_by_one_is_the_same() -> None:
    rng = np.random.default_rng(8)
    tokens = [int(t) for t in rng.integers(0, 20, 200)]
    logits = rng.normal(0, 1, 20).astype(np.float32)
    options = {"repeat_last_n": 50, "frequency_penalty": 0.1, "repeat_penalty": 1.2}
    once, single = chain(20, "penalties", **options), chain(20, "penalties", **options)
    once.accept(tokens)
    for token in tokens:
        single.accept([token])
    once.sample(logits)
    single.sample(logits)
    assert once.candidates() == single.candidates()


def test_sample_does_not_accept_its_token() -> None:
    sampler = chain(4, "penalties", presence_penalty=50.0)
    for _ in range(3):
        assert len(after(sampler, [0.25] * 4)) == 4


# Candidates


def test_candidates_fall_in_probability_and_equal_ones_rise_in_id() -> None:
    assert chain(4).candidates() == []
    found = after(chain(5), [0.1, 0.3, 0.1, 0.3, 0.2])
    assert [token for token, _ in found] == [1, 3, 4, 0, 2]
    sampler = chain(3)
    sampler.sample(np.array([0.0, -500.0, -1.0], dtype=np.float32))
    assert [token for token, _ in sampler.candidates()] == [0, 2], "a probability of zero is dropped"


# Arguments


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_zero_keeps_all_candidates(top_k: int) -> None:
    logits = np.array([4.0, 3.0, 2.0, 1.0, 0.0], dtype=np.float32)
    options = {"temperature": 5.0, "top_k": top_k, "top_p": 1.0, "min_p": 0.0}
    assert {Sampler(5, seed=seed, **options).sample(logits) for seed in range(50)} == {0, 1, 2, 3, 4}


def test_a_window_of_zero_switches_penalties_off() -> None:
    sampler = Sampler(4, seed=1, repeat_last_n=0, repeat_penalty=1.9, top_p=1.0, min_p=0.0, temperature=1.0)
    sampler.accept([0, 1, 2, 3])
    assert dict(after(sampler, [0.1, 0.2, 0.3, 0.4]))[0] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 999999.0},
        {"temperature": 1e-38},
        {"temperature": 1e-45},
        {"temperature": -3.0},
        {"temperature": 3e38},
        {"top_p": -1.0},
        {"top_p": math.inf},
        {"min_p": 1e30},
        {"min_p": math.inf},
        {"min_p": 1e-45},
        {"top_k": 2147483647},
        {"min_keep": 2147483647},
        {"repeat_last_n": 2147483647, "repeat_penalty": 1.5},
        {"repeat_penalty": 3e38},
        {"repeat_penalty": 3e-39},
        {"presence_penalty": 3e38, "frequency_penalty": 3e38},
        {"presence_penalty": -3e38, "frequency_penalty": -3e38},
        {"logit_bias": [(0, 3e38), (0, 3e38)]},
        {"logit_bias": [(0, -3e38), (0, -3e38)]},
    ],
)
def test_extreme_but_valid_options_give_a_token_and_finite_probabilities(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(6)
    for order in (STAGES, STAGES[::-1]):
        sampler = Sampler(30, **{"seed": 1, "samplers": order, **options})
        sampler.accept([0, 0, 0, 1, 2])
        for _ in range(5):
            assert 0 <= sampler.sample(rng.normal(0, 5, 30).astype(np.float32)) < 30
            assert sum(p for _, p in sampler.candidates()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"repeat_penalty": 0.0}, "repeat_penalty"),
        ({"repeat_penalty": -1.0}, "repeat_penalty"),
        ({"repeat_penalty": math.nan}, "repeat_penalty"),
        ({"repeat_penalty": math.inf}, "repeat_penalty"),
        ({"repeat_penalty": 1e-45}, "repeat_penalty"),
        ({"presence_penalty": math.inf}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repeat_last_n": -1}, "repeat_last_n"),
        ({"min_keep": -1}, "min_keep"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"logit_bias": [(1, math.nan)]}, "token 1"),
        ({"logit_bias": [(1, math.inf)]}, "token 1"),
        ({"samplers": ["mirostat"]}, "mirostat"),
    ],
)
def test_bad_options_are_invalid_arguments_that_name_the_option(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        Sampler(4, **options)


def test_a_row_of_the_wrong_length_and_foreign_tokens_are_invalid_arguments() -> None:
    sampler = Sampler(4, presence_penalty=1.0)
    with pytest.raises(InvalidArgument, match=r"5.*4"):
        sampler.sample(np.zeros(5, dtype=np.float32))
    for token in (-1, 4):
        with pytest.raises(InvalidArgument, match=str(token)):
            sampler.accept([0, token])
    with pytest.raises(InvalidArgument):
        Sampler(0)


# A mask


def mask_of(n_vocab: int, tokens: Sequence[int]) -> Any:
    mask = np.zeros(-(-n_vocab // 32), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def test_a_mask_bans_ahead_of_every_stage_until_it_is_lifted() -> None:
    row = np.arange(70, dtype=np.float32)
    sampler = chain(70, "top_k", top_k=2)
    sampler.set_mask(mask_of(70, [3, 31, 32, 64]))
    sampler.sample(row)
    assert [token for token, _ in sampler.candidates()] == [64, 32]
    assert {token for token, _ in after(sampler.clone(), [1 / 70] * 70)} <= {3, 31, 32, 64}
    sampler.set_mask(None)
    sampler.sample(row)
    assert [token for token, _ in sampler.candidates()] == [69, 68]


def test_a_masked_draw_is_the_draw_from_the_row_with_bans() -> None:
    rng = np.random.default_rng(3)
    for n_vocab in (1, 32, 33, 257):
        allowed = sorted({int(token) for token in rng.integers(0, n_vocab, 20)})
        row = rng.standard_normal(n_vocab).astype(np.float32)
        masked, banned = (Sampler(n_vocab, seed=9, temperature=1.2) for _ in range(2))
        masked.set_mask(mask_of(n_vocab, allowed))
        cut = np.full(n_vocab, -np.inf, np.float32)
        cut[allowed] = row[allowed]
        for _ in range(20):
            assert masked.sample(row) == banned.sample(cut)


def test_a_mask_of_the_wrong_size_or_without_tokens_is_refused() -> None:
    sampler = chain(33)
    for words in (0, 1, 3):
        with pytest.raises(InvalidArgument, match="mask"):
            sampler.set_mask(np.zeros(words, np.uint32))
    sampler.set_mask(np.zeros(2, np.uint32))
    with pytest.raises(InvalidArgument, match="banned"):
        sampler.sample(np.zeros(33, np.float32))
