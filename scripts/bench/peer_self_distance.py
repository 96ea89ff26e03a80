#!/usr/bin/env python3
"""How far llama.cpp is from itself when only the batching of a prompt changes: the floor under any comparison with it.

The golden log-probabilities of the tests were made token by token; here each prefix is evaluated at once. Prints mean
KL in nats and the share of positions with the same most likely token, prompt by prompt (about 20 minutes).

    python scripts/bench/peer_self_distance.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from bench.llama_cpp_peer import LlamaCppPeer  # noqa: E402  (needs the paths above)
from support.logprob_goldens import read_goldens  # noqa: E402

N_LISTED = 512


def main() -> int:
    parser = argparse.ArgumentParser(description="Distance of llama.cpp from itself, batched against token by token.")
    parser.add_argument("model", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=2)
    arguments = parser.parse_args()
    divergences: list[float] = []
    same: list[bool] = []
    with LlamaCppPeer(arguments.model, n_ctx=1024, n_threads=arguments.threads) as peer:
        for golden in read_goldens():
            for position in range(len(golden.tokens)):
                prefix = golden.tokens[: position + 1]
                listed = dict(peer.next_token_logprobs(prefix, N_LISTED, cache_prompt=False))
                expected = golden.top_logprobs[position]
                lowest = min(listed.values())
                found = np.array([listed.get(int(token), lowest) for token in golden.top_ids[position]])
                rest = [max(1.0 - float(np.exp(values).sum()), 1e-9) for values in (expected, found)]
                kl = float((np.exp(expected) * (expected - found)).sum()) + rest[0] * float(np.log(rest[0] / rest[1]))
                divergences.append(kl)
                same.append(int(golden.top_ids[position, 0]) == max(listed, key=listed.__getitem__))
            print(f"{golden.name}: so far KL {np.mean(divergences):.3e}, same argmax {np.mean(same):.2%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
