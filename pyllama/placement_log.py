"""What start logs say about where a model lies, in the words that scripts look for."""

from __future__ import annotations

from collections.abc import Iterator

from pyllama.devices import is_host
from pyllama.placement import MEBIBYTE, Placed


def load_lines(placed: Placed) -> Iterator[str]:
    """Layers on GPUs, and the memory of each device by what it holds."""
    if any(not is_host(need.device) for need in placed.needs):
        units = placed.n_layer + 1
        if placed.n_gpu_layers > 0:
            yield "load_tensors: offloading output layer to GPU"
            yield f"load_tensors: offloading {placed.n_gpu_layers - 1} repeating layers to GPU"
        yield f"load_tensors: offloaded {placed.n_gpu_layers}/{units} layers to GPU"
    for room, what, kind in (
        ("load_tensors", "model buffer", "weights"),
        ("llama_kv_cache", "KV buffer", "kv"),
        ("llama_memory_recurrent", "RS buffer", "states"),
        ("sched_reserve", "compute buffer", "compute"),
    ):
        for need in placed.needs:
            n_bytes = getattr(need, kind)
            if n_bytes > 0:
                yield f"{room}: {need.device:>10} {what} size = {n_bytes / MEBIBYTE:8.2f} MiB"
