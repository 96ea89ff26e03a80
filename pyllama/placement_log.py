"""What start logs say about where a model lies, in the words that scripts look for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyllama.devices import is_host
from pyllama.placement import MEBIBYTE, Placed, RankNeeds


def load_lines(placed: Placed) -> Iterator[str]:
    """Layers on GPUs, and the memory of each device by what it holds; then the same of a draft model."""
    yield from _lines(placed.needs, placed.n_layer, placed.n_gpu_layers)
    if (draft := placed.draft) is not None:
        devices = ", ".join(need.device for need in draft.needs)
        yield f"loading draft model '{draft.path}', it lies on {devices}"
        yield from _lines(draft.needs, draft.n_layer, draft.n_gpu_layers)


def _lines(needs: Sequence[RankNeeds], n_layer: int, n_gpu_layers: int) -> Iterator[str]:
    if any(not is_host(need.device) for need in needs):
        if n_gpu_layers > 0:
            yield "load_tensors: offloading output layer to GPU"
            yield f"load_tensors: offloading {n_gpu_layers - 1} repeating layers to GPU"
        yield f"load_tensors: offloaded {n_gpu_layers}/{n_layer + 1} layers to GPU"
    for room, what, kind in (
        ("load_tensors", "model buffer", "weights"),
        ("llama_kv_cache", "KV buffer", "kv"),
        ("llama_memory_recurrent", "RS buffer", "states"),
        ("sched_reserve", "compute buffer", "compute"),
    ):
        for need in needs:
            n_bytes = getattr(need, kind)
            if n_bytes > 0:
                yield f"{room}: {need.device:>10} {what} size = {n_bytes / MEBIBYTE:8.2f} MiB"
