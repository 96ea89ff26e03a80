"""Plain NumPy and Python versions of the samplers beyond the first set, by definition: the oracle of
test_more_samplers.py. Float64 throughout; quadratic where the definition is.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def outputs(seed: int, count: int) -> NDArray[np.uint32]:
    """The first 32-bit outputs of MT19937."""
    return np.random.RandomState(seed).randint(0, 1 << 32, size=count, dtype=np.uint32)


def softmax(logits: Numbers) -> Numbers:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def entropy(p: Numbers) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def draw(p: Numbers, uniform: float) -> int:
    cumulative = np.cumsum(p)
    return int(np.argmax((cumulative >= uniform * cumulative[-1]) & (p > 0)))


def top_n_sigma(logits: Numbers, n: float) -> Numbers:
    finite = logits[np.isfinite(logits)]
    return np.where(logits < finite.max() - n * finite.std(), -np.inf, logits)


def typical(logits: Numbers, p: float, min_keep: int) -> Numbers:
    q = softmax(logits)
    with np.errstate(divide="ignore"):
        score = np.abs(-np.log(q) - entropy(q))
    order = sorted(range(len(q)), key=lambda i: (score[i], -q[i], i))
    result = np.full(len(q), -np.inf)
    mass = 0.0
    for rank, i in enumerate(order):
        result[i] = logits[i]
        mass += q[i]
        if mass > p and rank + 1 >= min_keep:
            break
    return result


def xtc(logits: Numbers, threshold: float, min_keep: int) -> Numbers:
    """What it leaves when it acts."""
    q = softmax(logits)
    above = sorted((i for i in range(len(q)) if q[i] >= threshold), key=lambda i: (-q[i], i))
    if len(above) < 2 or len(q) - len(above) + 1 < min_keep:
        return logits
    result = logits.copy()
    result[above[:-1]] = -np.inf
    return result


def dynamic_temperature(logits: Numbers, temperature: float, spread: float, exponent: float) -> float:
    low, high = max(0.0, temperature - spread), temperature + spread
    return low + (high - low) * (entropy(softmax(logits)) / np.log(len(logits))) ** exponent


def dry_penalties(
    history: Sequence[int],
    last_n: int,
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Sequence[tuple[int, Sequence[int]]],
) -> dict[int, float]:
    """token -> what its logit loses. History in text order."""
    text = list(history[-last_n:])
    if len(text) <= allowed:
        return {}
    limit = len(text)
    for i in range(len(text)):  # tokens behind the place looked at
        place = len(text) - 1 - i
        tails = [
            len(tail)
            for head, tail in breakers
            if head == text[place] and list(tail) == text[place + 1 : place + 1 + len(tail)]
        ]
        if tails:
            limit = i - max(tails)
            break
    if limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for end in range(1, len(text)):  # text[:end] is an earlier present, text[end] what followed it
        run = 0
        while run < end and text[end - 1 - run] == text[len(text) - 1 - run]:
            run += 1
        if min(run, limit) >= allowed:
            longest[text[end]] = max(longest.get(text[end], 0), min(run, limit))
    single = {head for head, tail in breakers if not tail}
    cap = int(88.7228391 / np.log(base)) if base > 1.000001 else 10**9
    return {
        token: multiplier * base ** min(run - allowed, cap) for token, run in longest.items() if token not in single
    }


class Mirostat:
    def __init__(self, version: int, n_vocab: int, tau: float, eta: float) -> None:
        self.version, self.n_vocab, self.tau, self.eta = version, n_vocab, tau, eta
        self.mu = 2 * tau

    def step(self, logits: Numbers, uniform: float) -> tuple[int, list[int], bool]:
        """(token, kept tokens by falling logit, whether the random number was used)."""
        order = np.lexsort((np.arange(len(logits)), -logits))
        p = softmax(logits[order])
        if self.version == 2:
            with np.errstate(divide="ignore"):
                too_surprising = np.flatnonzero(-np.log2(p) > self.mu)
            kept = max(int(too_surprising[0]), 1) if len(too_surprising) else len(p)
        else:
            m = min(100, len(p))
            i = np.arange(m - 1)
            t, b = np.log((i + 2) / (i + 1)), np.log(p[i] / p[i + 1])
            s = (t * b).sum() / (t * t).sum()
            epsilon = s - 1
            k = (epsilon * 2**self.mu / (1 - self.n_vocab**-epsilon)) ** (1 / s)
            kept = int(min(max(int(min(k, 1e9)), 1), len(p)))
        p = softmax(logits[order[:kept]])
        position = draw(p, uniform) if kept > 1 else 0
        self.mu -= self.eta * (-np.log2(p[position]) - self.tau)
        return int(order[position]), [int(token) for token in order[:kept]], kept > 1


class AdaptiveP:
    def __init__(self, target: float, decay: float) -> None:
        self.target, self.decay = target, decay
        self.weighted, self.total = target / (1 - decay), 1 / (1 - decay)

    def step(self, logits: Numbers, uniform: float) -> tuple[int, Numbers, float]:
        """(token, probabilities it was drawn from, its probability before)."""
        before = softmax(logits)
        aim = min(max(2 * self.target - self.weighted / self.total, 0.0), 1.0)
        distance = np.abs(before - aim) / 0.3
        after = softmax(np.where(np.isfinite(logits), 5 - 10 * distance**2 / (1 + distance), -np.inf))
        token = draw(after, uniform)
        return token, after, float(before[token])

    def accept(self, probability: float) -> None:
        self.weighted = probability + self.decay * self.weighted
        self.total = 1 + self.decay * self.total
