#!/usr/bin/env python3
"""`llama-quantize` beside llama.cpp's, alternating: wall time, peak memory, and whether the files are equal.

    python scripts/bench/compare_quantize.py --peer BUILD/bin/llama-quantize -r 3 MODEL-F16.gguf Q8_0 Q4_K_M

Files go to a temporary folder beside the model (twice the size of a result is needed).
"""

from __future__ import annotations

import argparse
import filecmp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def timed(command: list[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of a program that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    message = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {' '.join(command)}: {message.decode(errors='replace')[-500:]}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("types", nargs="+")
    parser.add_argument("--peer", type=Path, required=True, help="llama-quantize of a llama.cpp")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    print(
        "| type | pyllama, s | llama.cpp, s | ratio of medians | peak memory, MB | files |\n|---|---|---|---|---|---|"
    )
    programs = [[sys.executable, "-m", "pyllama.tools.quantize"], [str(arguments.peer)]]
    with tempfile.TemporaryDirectory(dir=arguments.model.parent) as folder:
        targets = [Path(folder) / "ours.gguf", Path(folder) / "peer.gguf"]
        for type_name in arguments.types:
            seconds: list[list[float]] = [[], []]
            memory = [0, 0]
            for _ in range(arguments.repetitions):
                for side, (program, target) in enumerate(zip(programs, targets, strict=True)):
                    target.unlink(missing_ok=True)
                    command = [*program, str(arguments.model), str(target), type_name, str(arguments.threads)]
                    wall, peak = timed(command)
                    seconds[side].append(wall)
                    memory[side] = max(memory[side], peak)
            ours, peer = (statistics.median(values) for values in seconds)
            rows = " | ".join(f"{min(v):.1f} / **{statistics.median(v):.1f}** / {max(v):.1f}" for v in seconds)
            equal = "equal" if filecmp.cmp(*targets, shallow=False) else "differ"
            peaks = " / ".join(f"{peak / 1e6:.0f}" for peak in memory)
            print(f"| {type_name} | {rows} | {peer / ours:.1f} | {peaks} | {equal} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
