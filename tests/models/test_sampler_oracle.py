"""The sampler chain against llama.cpp's server (`xllamacpp`, a black box) on the same logits.

The server tells the log-probabilities of its raw logits over the whole vocabulary and, in another request, the
candidates after its chain with the token it drew. Our sampler gets those log-probabilities as logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pyllama._engine import Sampler
from pyllama.dry_breakers import DryBreakerTable
from pyllama.gguf import GgufFile
from pyllama.infill_vocabulary import InfillTable
from pyllama.server.logit_bias import read_logit_bias
from pyllama.server.request_fields import read_samplers
from pyllama.tokenizer import Tokenizer

xllamacpp = pytest.importorskip("xllamacpp", reason="needs the llama.cpp wheel")

SEED = 4
# The second prompt repeats itself and has breakers in it.
PROMPTS = ("The capital of the country is", "one two three, four five six. one two three, four five")

REQUESTS: tuple[dict[str, Any], ...] = (
    {"samplers": ["top_n_sigma"], "top_n_sigma": 2.0},
    {"samplers": ["top_k", "top_n_sigma"], "top_k": 40, "top_n_sigma": 0.7},
    {"samplers": ["typ_p"], "typical_p": 0.6},
    {"samplers": ["top_k", "typ_p", "temperature"], "top_k": 30, "typical_p": 0.4, "temperature": 1.3},
    {"samplers": ["typ_p"], "typical_p": 0.3, "min_keep": 5},
    {"samplers": ["top_k", "xtc"], "top_k": 20, "xtc_probability": 1.0, "xtc_threshold": 0.04},
    {"samplers": ["xtc", "temperature"], "xtc_probability": 1.0, "xtc_threshold": 0.04, "temperature": 0.0},
    {"samplers": ["top_k", "xtc"], "top_k": 20, "xtc_probability": 0.5, "xtc_threshold": 0.04},
    {"samplers": ["top_k", "temperature"], "top_k": 20, "dynatemp_range": 0.7, "dynatemp_exponent": 1.5},
    {"samplers": ["temperature", "top_k"], "top_k": 20, "dynatemp_range": 0.7, "temperature": 1.0},
    {"samplers": "dk", "top_k": 20, "dry_multiplier": 1.0, "dry_sequence_breakers": ["~"]},
    {"samplers": "dk", "top_k": 20, "dry_multiplier": 1.0, "dry_allowed_length": 1},
    {"samplers": "dk", "top_k": 20, "dry_multiplier": 1.0, "dry_sequence_breakers": ["ee, f"]},
    {"samplers": "dk", "top_k": 20, "dry_multiplier": 0.7, "dry_sequence_breakers": [".", "four f"]},
    {"samplers": "kd", "top_k": 20, "dry_multiplier": 0.7, "dry_penalty_last_n": 9, "dry_sequence_breakers": ["|"]},
    {"mirostat": 1, "mirostat_tau": 2.0, "samplers": "k", "top_k": 1},
    {"mirostat": 1, "mirostat_tau": 1.0, "temperature": 1.0},
    {"mirostat": 2, "mirostat_tau": 2.0, "temperature": 0.7},
    {"samplers": ["adaptive_p", "top_k"], "top_k": 12, "adaptive_target": 0.1, "adaptive_decay": 0.9},
    {"samplers": ["top_k", "adaptive_p"], "top_k": 12, "adaptive_target": 0.9, "adaptive_decay": 0.5},
    {"samplers": ["top_k", "adaptive_p"], "top_k": 12},
    # llama.cpp compares the texts of all pairs: behind a truncation only.
    {"samplers": ["top_k", "infill"], "top_k": 40},
    {"samplers": ["top_k", "infill"], "top_k": 60, "logit_bias": [["the", 2.0], ["th", 2.3], ["t", 2.0]]},
    {"samplers": ["temperature", "top_k", "infill"], "temperature": 0.2, "top_k": 500},
    {"samplers": "ki", "top_k": 30, "logit_bias": [["<|im_end|>", 12.0]]},
    {"samplers": "kit", "top_k": 6, "temperature": 2.0, "logit_bias": [[" a", 3.0], [" b", 4.0], [" be", 3.9]]},
    {"samplers": "kmpt", "top_k": 8, "min_p": 0.02, "top_p": 0.9, "temperature": 0.5},
    {"dry_multiplier": 0.8, "xtc_probability": 0.6, "typical_p": 0.95, "top_n_sigma": 3.0, "dynatemp_range": 0.3},
)


@pytest.fixture(scope="module")
def ask(smollm2_path: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """First position of llama.cpp's answer to a completion request."""
    params = xllamacpp.CommonParams()
    params.model.path = str(smollm2_path)
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.port = 0
    server = xllamacpp.Server(params)
    address = server.listening_address

    def first_position(request: dict[str, Any]) -> dict[str, Any]:
        body = {"n_predict": 1, "cache_prompt": False, "seed": SEED, "ignore_eos": False, **request}
        response = httpx.post(address + "/completion", json=body, timeout=120)
        response.raise_for_status()
        (position,) = response.json()["completion_probabilities"]
        return position

    yield first_position
    del server


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile(smollm2_path).metadata)


@pytest.fixture(scope="module")
def breakers(tokenizer: Tokenizer) -> DryBreakerTable:
    return DryBreakerTable(tokenizer)


@pytest.fixture(scope="module")
def logits(ask: Callable[[dict[str, Any]], dict[str, Any]], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    rows = {}
    for prompt in PROMPTS:
        row = np.full(tokenizer.n_vocab, -np.inf, np.float32)
        for entry in ask({"prompt": prompt, "n_probs": tokenizer.n_vocab})["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
        assert np.isfinite(row).all()
        rows[prompt] = row
    return rows


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("request_fields", REQUESTS, ids=str)
def test_candidates_and_the_drawn_token_are_those_of_llama_cpp(
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    tokenizer: Tokenizer,
    breakers: DryBreakerTable,
    logits: dict[str, np.ndarray],
    prompt: str,
    request_fields: dict[str, Any],
) -> None:
    position = ask({"prompt": prompt, "n_probs": tokenizer.n_vocab, "post_sampling_probs": True, **request_fields})
    options = dict(request_fields)
    if "samplers" in options:
        options["samplers"] = read_samplers(options["samplers"])
    options["logit_bias"] = read_logit_bias(options.get("logit_bias", []), tokenizer, tokenizer.n_vocab)
    texts = InfillTable(tokenizer, tokenizer.n_vocab).prepare() if "infill" in options.get("samplers", ()) else None
    strings = options.pop("dry_sequence_breakers", ["\n", ":", '"', "*"])
    shared = {"dry_breakers": breakers.prepare(strings), "infill_vocabulary": texts}
    sampler = Sampler(tokenizer.n_vocab, seed=SEED, **shared, **options)
    sampler.accept(tokenizer.encode(prompt, add_special=True, parse_special=True))
    token = sampler.sample(logits[prompt])

    ours = dict(sampler.candidates())
    theirs = {entry["id"]: entry["prob"] for entry in position["top_probs"]}
    # A candidate at the very edge of a cut may fall either way; it has hardly any probability.
    moved = sum(abs(ours.get(i, 0.0) - theirs.get(i, 0.0)) for i in ours.keys() | theirs.keys()) / 2
    assert moved < 1e-4, (len(ours), len(theirs))
    assert token == position["id"]
