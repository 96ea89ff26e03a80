"""Tables about an importance matrix: how much each weight is fed, how evenly, and how that grows by layer."""

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyllama.quantize.imatrix import Importance, ImportanceMatrix

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


@dataclass(frozen=True, slots=True)
class EntryStatistics:
    """Of the mean squares E[x²] of the columns of one weight, over all its matrices that saw tokens."""

    total: float
    lowest: float
    highest: float
    mean: float
    deviation: float
    evenness: float  # entropy of the columns' shares over the largest possible, 0..1


def statistics_of(entry: Importance) -> EntryStatistics:
    seen = entry.counts > 0
    squares: NDArray[np.float64] = (entry.in_sum2[seen].astype(np.float64) / entry.counts[seen, None]).ravel()
    if not squares.size:
        return EntryStatistics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    total = float(squares.sum())
    shares = squares[squares > 0] / total if total > 0 else np.zeros(0)
    entropy = -float((shares * np.log(shares)).sum())
    evenness = entropy / np.log(squares.size) if squares.size > 1 else 1.0
    return EntryStatistics(
        total, float(squares.min()), float(squares.max()), float(squares.mean()), float(squares.std()), float(evenness)
    )


def statistics_report(title: str, matrix: ImportanceMatrix) -> str:
    """Gain: root of the ratio of the sum to that of the same weight one layer before."""
    statistics = {name: statistics_of(entry) for name, entry in matrix.entries.items()}
    lines = [
        f"Statistics of {title} ({len(statistics)} tensors)",
        "",
        f" Layer | {'Tensor':<40} | {'∑ E[A²]':>14} {'Min':>12} {'Max':>12} {'Mean':>12} {'StdDev':>12} {'H Norm':>8} "
        f"{'Gain':>7}",
    ]
    lines.append("-" * len(lines[-1]))
    layers: dict[int, float] = defaultdict(float)
    for name in sorted(statistics, key=_in_order):
        s, match = statistics[name], _LAYER.fullmatch(name)
        gain = "-"
        if match:
            layers[int(match[1])] += s.total
            before = statistics.get(f"blk.{int(match[1]) - 1}.{match[2]}")
            gain = _gain(s.total, before.total if before else None)
        lines.append(
            f"{match[1] if match else '-':>6} | {name:<40} | {s.total:14.4f} {s.lowest:12.6f} {s.highest:12.6f} "
            f"{s.mean:12.6f} {s.deviation:12.6f} {100 * s.evenness:7.2f}% {gain:>7}"
        )
    lines += ["", f"{len(layers)} layers", "", f" Layer | {'∑ E[A²]':>14} {'Gain':>7}"]
    lines.append("-" * len(lines[-1]))
    for layer, total in sorted(layers.items()):
        lines.append(f"{layer:6d} | {total:14.4f} {_gain(total, layers.get(layer - 1)):>7}")
    return "\n".join(lines)


def _gain(total: float, before: float | None) -> str:
    return f"{(total / before) ** 0.5:.2f}" if before else "-"


def _in_order(name: str) -> tuple[int, int, str]:
    match = _LAYER.fullmatch(name)
    return (0, int(match[1]), match[2]) if match else (1, 0, name)
