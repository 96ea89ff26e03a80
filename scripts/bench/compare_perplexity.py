#!/usr/bin/env python3
"""`llama-perplexity` beside llama.cpp's on the same text and files: both estimates and their distance.

python scripts/bench/compare_perplexity.py --peer BUILD/bin/llama-perplexity -f TEXT MODEL.gguf [MODEL.gguf ...]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path


def estimate(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if done.returncode or match is None:
        raise SystemExit(f"error: {' '.join(command)}: {done.stderr.strip()[-500:]}")
    return float(match[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-f", "--file", type=Path, required=True)
    parser.add_argument("--peer", type=Path, required=True, help="llama-perplexity of a llama.cpp")
    parser.add_argument("-t", "--threads", type=int, default=2)
    arguments = parser.parse_args()
    print("| model | pyllama | llama.cpp | distance |\n|---|---|---|---|")
    for model in arguments.models:
        options = ["-m", str(model), "-f", str(arguments.file), "-t", str(arguments.threads)]
        ours = estimate([sys.executable, "-m", "pyllama.tools.perplexity", *options])
        peer = estimate([str(arguments.peer), *options])
        print(f"| {model.stem} | {ours:.4f} | {peer:.4f} | {abs(ours / peer - 1):.2%} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
