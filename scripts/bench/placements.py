#!/usr/bin/env python3
"""What a model takes of a card against what was planned, and what parts left to the CPU cost.

    PYTHONPATH=tests:scripts/bench python scripts/bench/placements.py [--model qwen3.5-35b-a3b:Q4_K_M] [--layers 16] \
        [--n-ctx 8192] [--threads 8]

The model has a published shape and random weights (`shaped_models.py`). "taken" is by how much the free memory of the
card fell from before loading to after a prompt of one ubatch; modules of kernels, staging buffers and what the driver
rounds up are in it, and in no plan.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import shaped_models

from pyllama._engine import Engine, MemoryNeeds, Model, cuda_status
from pyllama.placement import expert_overrides, total

MIB = 1 << 20
UBATCH = 512
STEPS = 12


def free_bytes() -> int:
    return int(cuda_status()["devices"][0]["free_bytes"])


def placements(layers: int, *, has_experts: bool) -> dict[str, dict[str, Any]]:
    gpu = {"devices": ["CUDA0"]}
    found: dict[str, dict[str, Any]] = {"all on the GPU": gpu}
    for n in (layers, layers // 2):
        found[f"-ngl {n}"] = {**gpu, "device_layers": n}
    if has_experts:
        for n in (1, layers // 4, layers):
            found[f"--n-cpu-moe {n}"] = {**gpu, "tensor_overrides": expert_overrides(n)}
    else:
        found["one feed-forward on the CPU"] = {**gpu, "tensor_overrides": [(r"blk\.0\.ffn_", "CPU")]}
    return found


def measure(path: Path, label: str, placement: dict[str, Any], arguments: argparse.Namespace) -> None:
    sizes = {"n_ctx": arguments.n_ctx, "n_ubatch": UBATCH}
    needs = {need.device: total(need) for need in MemoryNeeds(path).of(**sizes, **placement)}
    before = free_bytes()
    model = Model(path, n_threads=arguments.threads, **placement)
    engine = Engine(model, n_batch=UBATCH, n_threads=arguments.threads, **sizes)
    tokens = [(7 * i + 1) % model.n_vocab for i in range(UBATCH)]
    begin = time.perf_counter()
    engine.decode(tokens)
    prompt = time.perf_counter() - begin
    times = []
    for token in tokens[:STEPS]:
        begin = time.perf_counter()
        engine.decode([token])
        times.append(time.perf_counter() - begin)
    taken = before - free_bytes()
    planned = needs.get("CUDA0", 0)
    print(
        f"  {label:<28} {statistics.median(times[2:]) * 1e3:8.2f} ms a token, prompt of {UBATCH}: {prompt:6.2f} s, "
        f"planned {planned / MIB:8.0f} MiB, taken {taken / MIB:8.0f} MiB, host {needs.get('CPU', 0) / MIB:8.0f} MiB",
        flush=True,
    )
    engine.close()
    model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-35b-a3b:Q4_K_M")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    name, _, file_type = arguments.model.partition(":")
    shape = shaped_models.SHAPES[name]
    shape = replace(shape, layers=arguments.layers or shape.layers)
    path = arguments.folder / "placements.gguf"
    shaped_models.write(path, shape, file_type)
    print(f"{name} {file_type}, {shape.layers} layers, {path.stat().st_size / 1e9:.1f} GB", flush=True)
    for label, placement in placements(shape.layers, has_experts=shape.experts > 0).items():
        measure(path, label, placement, arguments)
    path.unlink()


if __name__ == "__main__":
    main()
