"""How far a model's next-token distributions are from saved ones: figures per position and their statistics."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .logits_file import DEPTH, decode_rows
from .scoring import Mean, token_logprobs

BLOCK_ROWS = 16  # positions compared at once: some megabytes of temporaries


@dataclass(frozen=True, slots=True)
class Comparison:
    """One value per position. `surprise`: -ln p of the token that follows."""

    surprise: NDArray[np.float64]
    base_surprise: NDArray[np.float64]
    divergence: NDArray[np.float64]  # KL(base || model), nats
    same_top: NDArray[np.bool_]

    @property
    def probability_change(self) -> NDArray[np.float64]:
        return np.exp(-self.surprise) - np.exp(-self.base_surprise)


def compare_rows(
    logits: NDArray[np.float32],
    log_sums: NDArray[np.float64],
    base_rows: NDArray[np.void],
    tokens: NDArray[np.int32],
) -> Comparison:
    """logits [rows, n_vocab] with their `log_sum_exp`; the saved rows; the tokens that follow."""
    n_rows, n_vocab = logits.shape
    divergence, same_top, base_surprise = np.empty(n_rows), np.empty(n_rows, bool), np.empty(n_rows)
    for start in range(0, n_rows, BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        base = decode_rows(base_rows[block], n_vocab)
        ours = logits[block] - log_sums[block, None].astype(np.float32)
        # Values cut off at the depth of the codes have no digits left and next to no probability.
        terms = np.where(base > -DEPTH, np.exp(base) * (base - ours), np.float32(0))
        divergence[block] = terms.sum(axis=1, dtype=np.float64)
        same_top[block] = base.argmax(axis=1) == ours.argmax(axis=1)
        base_surprise[block] = -base[np.arange(len(base)), tokens[block]]
    return Comparison(-token_logprobs(logits, log_sums, tokens), base_surprise, divergence, same_top)


def concatenated(parts: list[Comparison]) -> Comparison:
    names = ("surprise", "base_surprise", "divergence", "same_top")
    return Comparison(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    mean = Mean()
    mean.add(values)
    return mean.value, mean.error


@dataclass(frozen=True, slots=True)
class Summary:
    """Each figure with its standard error."""

    perplexity: tuple[float, float]
    base_perplexity: tuple[float, float]
    correlation: float  # of the two surprises
    log_ratio: tuple[float, float]  # ln(perplexity / base perplexity)
    ratio: tuple[float, float]
    difference: tuple[float, float]
    divergence: tuple[float, float]
    change: tuple[float, float]  # of the probability of the token that follows
    rms_change: tuple[float, float]
    same_top: tuple[float, float]


def summarise(c: Comparison) -> Summary:
    n = len(c.surprise)
    (ours, our_error), (base, base_error) = _mean(c.surprise), _mean(c.base_surprise)
    perplexity, base_perplexity = math.exp(ours), math.exp(base)
    covariance = 0.0
    if n > 1:
        covariance = (float(np.mean(c.surprise * c.base_surprise)) - ours * base) / (n - 1)
    log_ratio = ours - base
    log_ratio_error = math.sqrt(max(our_error**2 + base_error**2 - 2 * covariance, 0.0))
    errors = perplexity * our_error, base_perplexity * base_error
    difference_variance = errors[0] ** 2 + errors[1] ** 2 - 2 * perplexity * base_perplexity * covariance
    mean_square, mean_square_error = _mean(c.probability_change**2)
    rms = math.sqrt(mean_square)
    same = float(c.same_top.mean())
    return Summary(
        perplexity=(perplexity, errors[0]),
        base_perplexity=(base_perplexity, errors[1]),
        correlation=covariance / (our_error * base_error) if our_error * base_error else 0.0,
        log_ratio=(log_ratio, log_ratio_error),
        ratio=(math.exp(log_ratio), math.exp(log_ratio) * log_ratio_error),
        difference=(perplexity - base_perplexity, math.sqrt(max(difference_variance, 0.0))),
        divergence=_mean(c.divergence),
        change=_mean(c.probability_change),
        rms_change=(rms, mean_square_error / (2 * rms) if rms else 0.0),
        same_top=(same, math.sqrt(same * (1 - same) / (n - 1)) if n > 1 else 0.0),
    )


DIVERGENCE_MARKS = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)  # percent, falling
CHANGE_MARKS = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)

CHUNK_TITLE = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            "
    "Same top p"
)


def chunk_line(number: int, s: Summary) -> str:
    """Of all chunks up to this one."""
    return (
        f"{number:4d}    {_pm(s.perplexity, 10, 4)}    {_pm(s.log_ratio, 10, 5)}    {_pm(s.divergence, 10, 5)}    "
        f"{_percent(s.rms_change, 6)}    {_percent(s.same_top, 6)}"
    )


def report(c: Comparison, s: Summary) -> str:
    lines = [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {_pm(s.perplexity, 10, 6)}",
        f"Mean PPL(base)                : {_pm(s.base_perplexity, 10, 6)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * s.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {_pm(s.log_ratio, 10, 6)}",
        f"Mean PPL(Q)/PPL(base)         : {_pm(s.ratio, 10, 6)}",
        f"Mean PPL(Q)-PPL(base)         : {_pm(s.difference, 10, 6)}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {_pm(s.divergence, 10, 6)}",
    ]
    lines += [f"{mark} KLD: {value:10.6f}" for mark, value in _quantiles(c.divergence, DIVERGENCE_MARKS)]
    lines += ["", "====== Token probability statistics ======", f"Mean    Δp: {_percent(s.change)}"]
    lines += [f"{mark} Δp: {100 * value:6.3f}%" for mark, value in _quantiles(c.probability_change, CHANGE_MARKS)]
    lines += [f"RMS Δp    : {_percent(s.rms_change)}", f"Same top p: {_percent(s.same_top)}"]
    return "\n".join(lines)


def _quantiles(values: NDArray[np.float64], marks: tuple[float, ...]) -> list[tuple[str, float]]:
    names: dict[float, str] = {100: "Maximum", 50: "Median ", 0: "Minimum"}
    found = np.percentile(values, marks).tolist()
    return [(names.get(mark, f"{mark:4.1f}%  "), value) for mark, value in zip(marks, found, strict=True)]


def _pm(figure: tuple[float, float], width: int, digits: int) -> str:
    return f"{figure[0]:{width}.{digits}f} ± {figure[1]:{width}.{digits}f}"


def _percent(figure: tuple[float, float], width: int = 0) -> str:
    return f"{100 * figure[0]:6.3f} ± {100 * figure[1]:{width}.3f} %"
