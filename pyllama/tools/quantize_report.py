"""What `llama-quantize` tells on stderr: a line per tensor, or a progress bar on a terminal, and a summary."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pyllama.quantize.pipeline import Progress
from pyllama.quantize.plan import Plan, PlannedTensor

from .command_line import byte_progress, printable

_MIB = 1 << 20


@contextmanager
def reporter(*, verbose: bool) -> Iterator[Callable[[Progress], None]]:
    """What to call as the work goes on."""
    if verbose or not sys.stderr.isatty():
        lines = _Lines()
        try:
            yield lines.report
        finally:
            lines.end()  # an error is told on a line of its own
        return
    with ExitStack() as stack:
        advance: Callable[[int], None] | None = None
        reported = (0, 0)  # tensor, its bytes done

        def report(progress: Progress) -> None:
            nonlocal advance, reported
            if advance is None:
                advance = stack.enter_context(byte_progress("quantizing", progress.plan.source_bytes))
            before = reported[1] if reported[0] == progress.tensor_index else 0
            advance(progress.done_bytes - before)
            reported = progress.tensor_index, progress.done_bytes

        yield report


def print_plan(plan: Plan) -> None:
    """The lines of a dry run."""
    for index, tensor in enumerate(plan.tensors):
        sizes = _sizes(tensor)
        _print(_head(plan, index) + (f"{sizes} ({tensor.target.type_name})" if tensor.is_converted else sizes))
    if plan.unmet:
        _print(f"warning: the run itself would fail: {plan.unmet[0]}")


def print_summary(plan: Plan) -> None:
    for label, n_bytes in (("model size", plan.source_bytes), ("quant size", plan.target_bytes)):
        _print(f"{label}  = {n_bytes / _MIB:8.2f} MiB ({8 * n_bytes / max(1, plan.n_values):.2f} BPW)")
    fallbacks = plan.fallbacks
    if not fallbacks:
        return
    n_tensors = sum(fallback.n_tensors for fallback in fallbacks)
    _print(f"warning: {n_tensors} of {len(plan.tensors)} tensor(s) required fallback quantization")
    for fallback in fallbacks:
        _print(f"  {fallback.wanted:>7} -> {fallback.used:<7} {fallback.n_tensors} tensor(s)")
    share, wanted, used = plan.fallback_bits()
    _print(f"  {100 * share:.1f} % of the weights take {used:.2f} bits each instead of {wanted:.2f}")


class _Lines:
    """A line per tensor, its end when the tensor is done."""

    def __init__(self) -> None:
        self._is_open = False

    def report(self, progress: Progress) -> None:
        plan, index, done_bytes = progress
        tensor = plan.tensors[index]
        if done_bytes == 0:
            if tensor.choice is not None and tensor.choice.is_fallback:
                _print(
                    f"warning: {printable(tensor.target.name)}: rows of {tensor.source.shape[0]} values are not whole "
                    f"{tensor.choice.wanted} blocks, falling back to {tensor.choice.type_name}"
                )
            converting = f"converting to {tensor.target.type_name} .. " if tensor.is_converted else ""
            _print(_head(plan, index) + converting, end="")
            self._is_open = True
        if done_bytes == tensor.source.n_bytes:
            _print(_sizes(tensor))
            self._is_open = False

    def end(self) -> None:
        if self._is_open:
            _print("")


def _head(plan: Plan, index: int) -> str:
    tensor = plan.tensors[index]
    shape = ", ".join(f"{size:6d}" for size in (*tensor.source.shape, 1, 1, 1, 1)[:4])
    name = printable(tensor.target.name)
    return f"[{index + 1:4d}/{len(plan.tensors):4d}] {name:<36} - [{shape}], type = {tensor.source.type_name:>6}, "


def _sizes(tensor: PlannedTensor) -> str:
    if not tensor.is_converted:
        return f"size = {tensor.source.n_bytes / _MIB:8.3f} MiB"
    return f"size = {tensor.source.n_bytes / _MIB:8.2f} MiB -> {tensor.target.n_bytes / _MIB:8.2f} MiB"


def _print(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
