"""Golden log-probabilities of llama.cpp for SmolLM2 at every position of `PROMPTS`: how they are stored, read and made.

Two sets: ``q4_1`` from the file as it is, ``f32`` from the same weights decoded to F32 (no rounding of activations: the
exact model up to float sums). Per position the 64 most likely next tokens, as u16 id and u16 -log-probability in units
of 1/2048. F16 KV cache. Regenerate (minutes; needs the `xllamacpp` wheel):  python tests/support/logprob_goldens.py
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GOLDEN_DIR = Path(__file__).resolve().parent.parent / "golden"
TOP = 64
UNITS_PER_NAT = 2048.0


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    name: str
    tokens: list[int]
    top_ids: NDArray[np.int64]  # [positions, TOP], falling probability; row i is what follows tokens[: i + 1]
    top_logprobs: NDArray[np.float64]  # [positions, TOP], natural logarithm


@dataclass(frozen=True, slots=True)
class PeerNoise:
    """How far llama.cpp with Q4_1 weights is from itself with the same weights in F32: what 8-bit activations cost."""

    mean_kl: float  # KL(F32 || Q4_1) in nats, over all positions
    same_argmax: float  # share of positions


def golden_path(weights: str) -> Path:
    return GOLDEN_DIR / f"smollm2_{weights}_logprobs.npz"


def read_goldens(weights: str = "q4_1") -> list[GoldenPrompt]:
    with np.load(golden_path(weights)) as stored:
        names = [str(name) for name in stored["names"]]
        borders = np.cumsum([0, *stored["lengths"]])
        tokens, ids = stored["tokens"], stored["top_ids"].astype(np.int64)
        logprobs = -stored["top_neg_logprobs"].astype(np.float64) / UNITS_PER_NAT
    spans = zip(names, borders[:-1], borders[1:], strict=True)
    return [GoldenPrompt(name, tokens[a:b].tolist(), ids[a:b], logprobs[a:b]) for name, a, b in spans]


def read_peer_noise() -> PeerNoise:
    with np.load(golden_path("q4_1")) as stored:
        return PeerNoise(float(stored["mean_kl_to_f32"]), float(stored["same_argmax_as_f32"]))


@dataclass(frozen=True, slots=True)
class PeerRun:
    names: list[str]
    lengths: list[int]
    tokens: list[int]
    ids: NDArray[np.int64]  # [positions, listed]
    logprobs: NDArray[np.float64]  # [positions, listed]
    build: str


def run_peer(model: Path, n_listed: int) -> PeerRun:
    from bench.llama_cpp_peer import LlamaCppPeer
    from support.prompts import PROMPTS

    lengths: list[int] = []
    all_tokens: list[int] = []
    rows: list[list[tuple[int, float]]] = []
    with LlamaCppPeer(model, n_threads=1) as peer:
        for name, text in PROMPTS.items():
            tokens = peer.tokenize(text)
            rows += [peer.next_token_logprobs(tokens[:length], n_listed) for length in range(1, len(tokens) + 1)]
            lengths.append(len(tokens))
            all_tokens += tokens
            print(f"{model.name}: {name}: {len(tokens)} tokens", flush=True)
        build = peer.build
    ids = np.asarray([[token for token, _ in row] for row in rows])
    logprobs = np.asarray([[logprob for _, logprob in row] for row in rows])
    return PeerRun(list(PROMPTS), lengths, all_tokens, ids, logprobs, build)


def peer_noise(exact: PeerRun, quantised: PeerRun, n_vocab: int) -> PeerNoise:
    """KL over the TOP tokens of `exact` and a bucket; `quantised` lists enough tokens to hold nearly all of them."""
    from support.logits import kl_divergence

    kls = []
    for row in range(len(exact.ids)):
        # What `quantised` does not list shares its remaining mass evenly: these are the least likely tokens.
        listed = quantised.logprobs[row]
        rest = max(1.0 - np.exp(listed).sum(), 1e-12) / (n_vocab - len(listed))
        logits = np.full((1, n_vocab), np.log(rest))
        logits[0, quantised.ids[row]] = listed
        kls.append(kl_divergence(exact.ids[row : row + 1, :TOP], exact.logprobs[row : row + 1, :TOP], logits)[0])
    return PeerNoise(float(np.mean(kls)), float((exact.ids[:, 0] == quantised.ids[:, 0]).mean()))


def write_goldens(weights: str, run: PeerRun, noise: PeerNoise | None) -> None:
    units = np.rint(-run.logprobs[:, :TOP] * UNITS_PER_NAT)
    if units.min() < 0 or units.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"log-probabilities reach {-units.max() / UNITS_PER_NAT}; the 16-bit form holds 0 .. -32")
    arrays = {
        "names": np.asarray(run.names),
        "lengths": np.asarray(run.lengths, np.int32),
        "tokens": np.asarray(run.tokens, np.uint16),
        "top_ids": run.ids[:, :TOP].astype(np.uint16),
        "top_neg_logprobs": units.astype(np.uint16),
        "made_with": np.asarray(f"xllamacpp {run.build}"),
    }
    if noise is not None:
        arrays |= {"mean_kl_to_f32": np.asarray(noise.mean_kl), "same_argmax_as_f32": np.asarray(noise.same_argmax)}
    np.savez_compressed(golden_path(weights), **arrays)
    print(f"{golden_path(weights)}: {len(run.tokens)} positions, {golden_path(weights).stat().st_size} bytes")


def main() -> None:
    from fetch_demo_model import SMOLLM2_Q4_1

    from support.model_cache import cached
    from support.requantize import requantize

    source = cached(SMOLLM2_Q4_1)
    quantised = run_peer(source, 1024)
    with tempfile.TemporaryDirectory() as work:
        decoded = Path(work) / "SmolLM2-135M-Instruct.F32.gguf"
        requantize(source, decoded, "f32")
        exact = run_peer(decoded, TOP)
    noise = peer_noise(exact, quantised, n_vocab=49152)
    print(noise)
    write_goldens("q4_1", quantised, noise)
    write_goldens("f32", exact, None)


if __name__ == "__main__":
    sys.path[:0] = [str(GOLDEN_DIR.parent), str(GOLDEN_DIR.parent.parent / "scripts")]
    main()
