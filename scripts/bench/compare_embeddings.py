"""Embeddings of the server beside llama.cpp's: many short texts in one request, and one long text.

`python scripts/bench/compare_embeddings.py [-t N] [-r N] MODEL.gguf`. Both servers live in processes of their own and
take turns; a row shows tokens per second, medians with minimum and maximum. Needs the `xllamacpp` wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.llama_cpp_peer import LlamaCppPeer

N_CTX = 2048
CASES = {
    "64 texts of 16 tokens": [[1000 + 7 * text + token for token in range(16)] for text in range(64)],
    "1 text of 480 tokens": [[2000 + 3 * token for token in range(480)]],
}


class OurServer:
    """`llama-server --embeddings` on a free port."""

    def __init__(self, model: str, n_threads: int) -> None:
        command = [sys.executable, "-m", "pyllama.server", "--port", "0", "-m", model, "-c", str(N_CTX)]
        command += ["-t", str(n_threads), "--embeddings", "--pooling", "mean"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd="/")
        self.address = ""
        for line in self._process.stderr:
            if (found := re.search(r"listening on (http://\S+)", line)) is not None:
                self.address = found[1]
                break
        if not self.address:
            raise RuntimeError("the server did not start")
        os.set_blocking(self._process.stderr.fileno(), False)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._process.stderr.close()


def seconds(client: httpx.Client, address: str, texts: list[list[int]]) -> float:
    started = time.perf_counter()
    response = client.post(address + "/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    elapsed = time.perf_counter() - started
    if response.status_code != 200 or len(response.json()["data"]) != len(texts):
        raise RuntimeError(response.text[:300])
    return elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve())
    ours = OurServer(model, arguments.threads)
    try:
        with (
            httpx.Client(timeout=600) as client,
            LlamaCppPeer(model, n_ctx=N_CTX, n_threads=arguments.threads, n_parallel=4, pooling="mean") as peer,
        ):
            for name, texts in CASES.items():
                n_tokens = sum(map(len, texts))
                rates: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
                for _ in range(arguments.repetitions):
                    for label, address in (("ours", ours.address), ("llama.cpp", peer.address)):
                        rates[label].append(n_tokens / seconds(client, address, texts))
                medians = {label: statistics.median(values) for label, values in rates.items()}
                shown = ", ".join(
                    f"{label} {medians[label]:.0f} ({min(values):.0f}-{max(values):.0f})"
                    for label, values in rates.items()
                )
                print(f"{name}: tokens/s {shown}; ratio {medians['ours'] / medians['llama.cpp']:.2f}")
    finally:
        ours.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
