"""Samplers beyond the first set against their definitions (steering_oracle.py) and hand-computed values."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from unit import steering_oracle as oracle
from unit.sampling_oracle import uniforms

from pyllama._engine import DryBreakers, Sampler
from pyllama.errors import InvalidArgument


def chain(n_vocab: int, *stages: str, **options: Any) -> Any:
    return Sampler(n_vocab, samplers=stages, **{"seed": 1, **options})


def after(sampler: Any, probabilities: Sequence[float]) -> dict[int, float]:
    """Candidates after one draw from the given distribution."""
    with np.errstate(divide="ignore"):
        sampler.sample(np.log(np.array(probabilities, dtype=np.float32)))
    return dict(sampler.candidates())


def require_distribution(sampler: Any, logits: np.ndarray, expected_logits: np.ndarray, where: object) -> None:
    """The candidates after a draw from `logits` are the softmax of `expected_logits`."""
    sampler.sample(logits.astype(np.float32))
    found = np.zeros(len(logits))
    for token, p in sampler.candidates():
        found[token] = p
    expected = oracle.softmax(expected_logits)
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-5, err_msg=str(where))


def rows(seed: int, count: int = 30) -> list[np.ndarray]:
    """Rows of f32 values in f64: flat, ordinary and peaked ones, short and long, some with banned tokens."""
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        row = rng.normal(0, rng.choice([0.05, 1.5, 5.0]), int(rng.choice([2, 7, 40, 700]))).astype(np.float32)
        if i % 4 == 0 and len(row) > 2:
            row[rng.integers(1, len(row), len(row) // 3)] = -np.inf
        result.append(row.astype(np.float64))
    return result


# Top-n-sigma, locally typical, XTC, dynamic temperature


@pytest.mark.parametrize(
    ("stage", "options", "given", "expected"),
    [
        ("top_n_sigma", {"top_n_sigma": 1.0}, [0.1, 0.2, 0.3, 0.4], {3: 0.571429, 2: 0.428571}),
        ("top_n_sigma", {"top_n_sigma": 0.0}, [0.1, 0.2, 0.3, 0.4], {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("top_n_sigma", {"top_n_sigma": 3.0}, [0.1, 0.2, 0.3, 0.4], {3: 0.4, 2: 0.3, 1: 0.2, 0: 0.1}),
        ("typ_p", {"typical_p": 0.5}, [0.97, 0.01, 0.01, 0.01], {0: 1.0}),
        ("typ_p", {"typical_p": 0.5}, [0.4, 0.2, 0.2, 0.2], {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}),
        ("typ_p", {"typical_p": 0.5, "min_keep": 4}, [0.4, 0.2, 0.2, 0.2], {0: 0.4, 1: 0.2, 2: 0.2, 3: 0.2}),
        ("typ_p", {"typical_p": 1.0}, [0.4, 0.6], {1: 0.6, 0: 0.4}),
        ("xtc", {"xtc_threshold": 0.19}, [0.4, 0.3, 0.2, 0.1], {2: 2 / 3, 3: 1 / 3}),
        ("xtc", {"xtc_threshold": 0.29}, [0.4, 0.3, 0.2, 0.1], {1: 0.5, 2: 1 / 3, 3: 1 / 6}),
        ("xtc", {"xtc_threshold": 0.39}, [0.4, 0.3, 0.2, 0.1], {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
        ("xtc", {"xtc_threshold": 0.51}, [0.6, 0.4], {0: 0.6, 1: 0.4}),
        ("xtc", {"xtc_threshold": 0.19, "min_keep": 3}, [0.4, 0.3, 0.2, 0.1], {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}),
    ],
)
def test_one_stage_gives_the_expected_probabilities(
    stage: str, options: dict[str, Any], given: list[float], expected: dict[int, float]
) -> None:
    found = after(chain(4 if len(given) == 4 else 2, stage, xtc_probability=1.0, **options), given)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_truncations_equal_their_definitions(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for row in rows(seed):
        n, p, threshold = rng.uniform(0.2, 3), rng.uniform(0.05, 0.99), rng.uniform(0.01, 0.5)
        n, p, threshold = (float(np.float32(value)) for value in (n, p, threshold))
        min_keep = int(rng.choice([0, 0, 3]))
        where = (seed, len(row), n, p, threshold, min_keep)
        size = len(row)
        require_distribution(chain(size, "top_n_sigma", top_n_sigma=n), row, oracle.top_n_sigma(row, n), where)
        sampler = chain(size, "typ_p", typical_p=p, min_keep=min_keep)
        require_distribution(sampler, row, oracle.typical(row, p, min_keep), where)
        sampler = chain(size, "xtc", xtc_probability=1.0, xtc_threshold=threshold, min_keep=min_keep)
        require_distribution(sampler, row, oracle.xtc(row, threshold, min_keep), where)
        # On a narrowed, sorted list the same as on that part of the row.
        sampler = chain(size, "top_k", "typ_p", "top_n_sigma", top_k=20, typical_p=p, top_n_sigma=n)
        kept = np.full(size, -np.inf)
        order = np.lexsort((np.arange(size), -row))[:20]
        kept[order] = row[order]
        kept = oracle.typical(kept, p, 0)
        require_distribution(sampler, row, oracle.top_n_sigma(kept, n), where)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_dynamic_temperature_follows_the_entropy(exponent: float) -> None:
    for row in rows(5):
        for temperature, spread in ((0.8, 0.5), (0.3, 1.0), (1.0, 0.25)):
            sampler = chain(
                len(row), "temperature", temperature=temperature, dynatemp_range=spread, dynatemp_exponent=exponent
            )
            expected = row / oracle.dynamic_temperature(row, temperature, spread, exponent)
            require_distribution(sampler, row, expected, (len(row), temperature, spread))


def test_dynamic_temperature_counts_the_candidates_that_are_left() -> None:
    row = np.array([3.0, 2.0, 1.0, 0.0, -1.0])
    found = chain(5, "top_k", "temperature", top_k=3, temperature=1.0, dynatemp_range=0.9)
    kept = np.where(row >= 1, row, -np.inf)
    require_distribution(found, row, kept / oracle.dynamic_temperature(row[:3], 1.0, 0.9, 1.0), "top-k first")


def test_temperature_zero_with_a_range_is_not_greedy() -> None:
    assert len(after(chain(4, "temperature", temperature=0.0, dynatemp_range=1.0), [0.25, 0.25, 0.3, 0.2])) == 4
    assert len(after(chain(4, "temperature", temperature=0.0), [0.25, 0.25, 0.3, 0.2])) == 1


def test_xtc_draws_from_a_generator_of_its_own() -> None:
    """It acts where one f32 number per step is at most the probability; the draw's numbers stay what they were."""
    seed, steps, probability = 77, 200, 0.4
    sampler = chain(4, "xtc", seed=seed, xtc_probability=probability, xtc_threshold=0.1)
    chances = oracle.outputs(seed, steps).astype(np.float32) / np.float32(2**32)
    p = np.array([0.4, 0.3, 0.25, 0.05])
    logits = np.log(p).astype(np.float32)
    n_acted = 0
    for chance, uniform in zip(chances, uniforms(seed, steps), strict=True):
        acts = chance <= np.float32(probability)
        n_acted += int(acts)
        order = np.array([2, 3] if acts else [0, 1, 2, 3])
        assert sampler.sample(logits) == order[oracle.draw(p[order], uniform)]
    assert 0.25 * steps < n_acted < 0.55 * steps


def test_xtc_without_a_threshold_leaves_the_least_likely_candidate_that_is_allowed() -> None:
    assert after(chain(4, "xtc", xtc_probability=1.0, xtc_threshold=0.0), [0.5, 0.3, 0.2, 0.0]) == {2: 1.0}


def test_xtc_before_a_greedy_temperature_takes_the_least_likely_of_the_likely() -> None:
    sampler = chain(4, "xtc", "temperature", xtc_probability=1.0, xtc_threshold=0.15, temperature=0.0)
    assert after(sampler, [0.4, 0.3, 0.2, 0.1]) == {2: 1.0}
    sampler = chain(4, "temperature", "xtc", xtc_probability=1.0, xtc_threshold=0.15, temperature=0.0)
    assert after(sampler, [0.4, 0.3, 0.2, 0.1]) == {0: 1.0}


# DRY


@pytest.mark.parametrize(
    ("n_vocab", "history", "options", "breakers", "expected"),
    [
        (4, [0, 1, 2, 0, 1], {}, [], {0: 0.296923, 1: 0.296923, 2: 0.109232, 3: 0.296923}),
        (5, [0, 1, 2, 0, 1], {"dry_multiplier": 2.0}, [], {**dict.fromkeys(range(5), 0.241818), 2: 0.032727}),
        (5, [0, 1, 3, 4, 0, 1], {}, [(3, ())], dict.fromkeys(range(5), 0.2)),
        (4, [0, 1, 2, 0, 1], {"dry_penalty_last_n": 4}, [], dict.fromkeys(range(4), 0.25)),
        (4, [0, 1, 2, 0, 1], {"dry_base": 0.9}, [], dict.fromkeys(range(4), 0.25)),
        (4, [0, 1, 2, 0, 1], {"dry_multiplier": 0.0}, [], dict.fromkeys(range(4), 0.25)),
    ],
)  # fmt: skip
def test_dry_gives_the_expected_probabilities(
    n_vocab: int, history: list[int], options: dict[str, Any], breakers: list[Any], expected: dict[int, float]
) -> None:
    given = {"dry_multiplier": 1.0, "dry_base": 1.1, "dry_breakers": DryBreakers(breakers), **options}
    sampler = chain(n_vocab, "dry", **given)
    sampler.accept(history)
    assert after(sampler, [1 / n_vocab] * n_vocab) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_dry_equals_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_penalised = 0
    for _ in range(60):
        n_vocab = int(rng.choice([3, 4, 9]))
        history = [int(t) for t in rng.integers(0, n_vocab, rng.integers(0, 60))]
        if rng.integers(0, 2) and history:
            history = (history[:7] * 8)[: len(history)]  # strong repetitions
        last_n, allowed = int(rng.choice([1, 5, 30, 64])), int(rng.integers(0, 4))
        multiplier, base = float(rng.choice([0.75, -0.5, 2.0])), float(rng.choice([1.0, 1.5, 1.75]))
        breakers = [
            (int(rng.integers(0, n_vocab)), tuple(int(t) for t in rng.integers(0, n_vocab, rng.integers(0, 3))))
            for _ in range(rng.integers(0, 4))
        ]
        where = (n_vocab, history, last_n, allowed, multiplier, base, breakers)
        lost = oracle.dry_penalties(history, last_n, multiplier, base, allowed, breakers)
        n_penalised += len(lost)
        row = rng.normal(0, 1, n_vocab).astype(np.float32).astype(np.float64)
        expected = row - np.array([lost.get(token, 0.0) for token in range(n_vocab)])
        for stages in (("dry",), ("top_k", "dry")):
            sampler = chain(
                n_vocab, *stages, top_k=n_vocab, dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed,
                dry_penalty_last_n=last_n, dry_breakers=DryBreakers(breakers),
            )  # fmt: skip
            for token in history:
                sampler.accept([token])
            require_distribution(sampler, row, expected, where)
    assert n_penalised > 20


def test_dry_bounds_its_penalty_and_forgets_at_reset() -> None:
    sampler = chain(3, "dry", dry_multiplier=1.0, dry_base=3.0, dry_penalty_last_n=4096)
    sampler.accept([0, 1] * 1000)
    found = after(sampler, [0.2, 0.4, 0.4])
    assert found == pytest.approx({1: 0.5, 2: 0.5})
    sampler.reset()
    assert after(sampler, [0.2, 0.4, 0.4]) == pytest.approx({0: 0.2, 1: 0.4, 2: 0.4})


# Mirostat


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_mirostat_equals_its_definition(version: int, temperature: float) -> None:
    n_vocab, seed = 400, 31
    rng = np.random.default_rng(version)
    sampler = Sampler(
        n_vocab, seed=seed, mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=temperature,
        top_k=1, presence_penalty=100.0,
    )  # fmt: skip
    expected = oracle.Mirostat(version, n_vocab, 3.0, 0.2)
    numbers = iter(uniforms(seed, 200))
    number = next(numbers)
    sizes = set()
    for _ in range(150):
        row = rng.normal(0, 2.5, n_vocab).astype(np.float32)
        token, kept, was_used = expected.step(row.astype(np.float64) / float(np.float32(temperature)), number)
        assert sampler.sample(row) == token
        assert [candidate for candidate, _ in sampler.candidates()] == kept
        sampler.accept([token])
        sizes.add(len(kept))
        if was_used:
            number = next(numbers)
    assert len(sizes) > 10, "the list's length follows the surprise"


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_holds_the_surprise_at_its_target(version: int) -> None:
    """Zipf's law, as the method assumes: the mean surprise of the drawn tokens becomes tau."""
    logits = -1.1 * np.log(np.arange(1, 3001)).astype(np.float32)
    for tau in (2.0, 4.0):
        sampler = Sampler(3000, seed=5, mirostat=version, mirostat_tau=tau, mirostat_eta=0.1, temperature=1.0)
        surprises = []
        for _ in range(1500):
            token = sampler.sample(logits)
            surprises.append(-math.log2(dict(sampler.candidates())[token]))
        assert np.mean(surprises[200:]) == pytest.approx(tau, abs=0.15)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_survives_rows_without_a_slope(version: int) -> None:
    sampler = Sampler(50, seed=5, mirostat=version, temperature=1.0)
    flat, single = np.zeros(50, np.float32), np.full(50, -np.inf, np.float32)
    single[9] = 0
    for _ in range(20):
        assert 0 <= sampler.sample(flat) < 50
        assert sampler.sample(single) == 9


def test_mirostat_begins_anew_at_reset() -> None:
    sampler = Sampler(300, seed=5, mirostat=2, mirostat_eta=0.5)
    rng = np.random.default_rng(0)
    logits = [rng.normal(0, 2, 300).astype(np.float32) for _ in range(40)]
    first = [sampler.sample(row) for row in logits]
    assert [sampler.sample(row) for row in logits] != first
    sampler.reset()
    assert [sampler.sample(row) for row in logits] == first


# Adaptive-p


@pytest.mark.parametrize(
    "order", [("adaptive_p", "top_k"), ("top_k", "adaptive_p"), ("top_k", "adaptive_p", "adaptive_p")]
)
def test_adaptive_p_equals_its_definition_wherever_it_is_named(order: tuple[str, ...]) -> None:
    n_vocab, seed, steps = 60, 8, 120
    rng = np.random.default_rng(3)
    sampler = chain(n_vocab, *order, seed=seed, top_k=25, adaptive_target=0.3, adaptive_decay=0.8)
    expected = oracle.AdaptiveP(float(np.float32(0.3)), float(np.float32(0.8)))
    for step, uniform in enumerate(uniforms(seed, steps)):
        row = rng.normal(0, 2, n_vocab).astype(np.float32)
        kept = np.lexsort((np.arange(n_vocab), -row))[:25]
        position, after_draw, probability = expected.step(row[kept].astype(np.float64), uniform)
        assert sampler.sample(row) == kept[position]
        found = dict(sampler.candidates())
        np.testing.assert_allclose([found[int(t)] for t in kept], after_draw, rtol=1e-4, atol=1e-7)
        if step % 5 == 0:  # another token than the drawn one leaves the average alone
            sampler.accept([int(kept[(position + 1) % 25])])
        else:
            sampler.accept([int(kept[position])])
            expected.accept(probability)


def test_adaptive_p_without_a_target_is_an_ordinary_draw() -> None:
    sampler = chain(4, "adaptive_p", seed=2)
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    assert [sampler.sample(logits) for _ in range(50)] == [
        oracle.draw(np.array([0.1, 0.2, 0.3, 0.4]), u) for u in uniforms(2, 50)
    ]


# Arguments


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": -1.0, "samplers": ["typ_p", "typ_p"]},
        {"top_n_sigma": 1e-30, "samplers": ["top_n_sigma", "top_p"]},
        {"top_n_sigma": math.inf, "samplers": ["top_n_sigma"]},
        {"xtc_probability": 2.0, "xtc_threshold": -1.0, "samplers": ["xtc", "xtc", "xtc"]},
        {"dynatemp_range": 3e38, "dynatemp_exponent": -50.0, "temperature": 3e38},
        {"dynatemp_range": 1e-30, "dynatemp_exponent": 0.0},
        {"dry_multiplier": 3e38, "dry_base": 3e38, "dry_allowed_length": 0, "dry_penalty_last_n": 2147483647},
        {"dry_multiplier": -3e38, "dry_allowed_length": 1},
        {"mirostat": 1, "mirostat_tau": 3e38, "mirostat_eta": 3e38},
        {"mirostat": 1, "mirostat_tau": -3e38, "mirostat_eta": -3e38},
        {"mirostat": 2, "mirostat_tau": -5.0, "mirostat_eta": 0.0},
        {"samplers": ["adaptive_p"], "adaptive_target": 1.0, "adaptive_decay": 3.0},
        {"samplers": ["adaptive_p"], "adaptive_target": 0.0, "adaptive_decay": -3.0},
    ],
)
def test_extreme_but_valid_options_give_a_token_and_finite_probabilities(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(6)
    sampler = Sampler(30, **{"seed": 1, **options})
    sampler.accept([0, 1, 0, 1, 0, 1, 2])
    for _ in range(30):
        row = rng.normal(0, 5, 30).astype(np.float32)
        row[rng.integers(1, 30, 10)] = -np.inf
        token = sampler.sample(row)
        assert row[token] > -np.inf
        assert sum(p for _, p in sampler.candidates()) == pytest.approx(1.0, abs=1e-5)
        sampler.accept([token])


@pytest.mark.parametrize(
    "option",
    [
        {"dynatemp_range": math.inf}, {"dynatemp_exponent": math.nan}, {"top_n_sigma": math.nan},
        {"typical_p": math.nan}, {"xtc_probability": math.nan}, {"xtc_threshold": math.nan},
        {"dry_multiplier": math.inf}, {"dry_base": math.nan}, {"dry_allowed_length": -1}, {"dry_penalty_last_n": -1},
        {"mirostat": 3}, {"mirostat": -1}, {"mirostat_tau": math.inf}, {"mirostat_eta": math.nan},
        {"adaptive_target": math.nan}, {"adaptive_decay": math.inf},
    ],
)  # fmt: skip
def test_bad_options_are_invalid_arguments_that_name_the_option(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(option))):
        Sampler(4, **option)
