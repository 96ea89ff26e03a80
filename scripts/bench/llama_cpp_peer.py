"""llama.cpp as a peer: its server (PyPI wheel `xllamacpp`) in a process of its own, spoken to over HTTP.

Used by the benchmarks (its `timings`) and by the tests (its tokens and log-probabilities). Run as a program it is that
process: it prints the address of the server and lives until its standard input is closed. One server per process, and
the process leaves without tearing the server down, because tearing down can hang.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

POOLING_TYPES = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


class PeerError(RuntimeError):
    """The peer did not start or refused a request; the message carries what it said."""


def peer_is_installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


class LlamaCppPeer:
    """A running llama.cpp server with an F16 KV cache, one slot unless asked for more. Use as a context manager.

    f32_cache: K and V are kept in F32, also those of a drafter.
    pooling: serve embeddings, pooled so (none, mean, cls, last, rank; "model": as the file says).
    adapters: LoRA files, loaded with scale 1. spec_type: name of a drafter as in `--spec-type`, whose drafts have
    `n_draft` tokens at most and end at less than `p_min`; drafter: its file.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        n_ctx: int = 2048,
        n_threads: int = 2,
        n_parallel: int = 1,
        pooling: str | None = None,
        context_shift: bool = False,
        f32_cache: bool = False,
        adapters: Sequence[Path | str] = (),
        spec_type: str | None = None,
        drafter: Path | str | None = None,
        p_min: float = 0.0,
        n_draft: int = 3,
        start_timeout_s: float = 120.0,
    ) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--model", str(model), "--ctx-size", str(n_ctx)]
        command += ["--threads", str(n_threads), "--parallel", str(n_parallel)]
        command += ["--pooling", pooling] if pooling is not None else []
        command += ["--context-shift"] if context_shift else []
        command += ["--f32-cache"] if f32_cache else []
        if spec_type is not None:
            command += ["--spec-type", spec_type, "--n-draft", str(n_draft)]
        command += ["--drafter", str(drafter)] if drafter is not None else []
        command += ["--p-min", str(p_min)] if p_min else []
        command += [argument for path in adapters for argument in ("--lora", str(path))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._log: list[str] = []
        self._letter: int | None = None  # a token whose text is complete on its own
        # Both pipes are drained by threads: a full pipe would stop the server.
        first_line: list[str] = []
        reader = threading.Thread(target=lambda: first_line.append(self._process.stdout.readline()), daemon=True)
        self._log_reader = threading.Thread(target=lambda: self._log.extend(self._process.stderr), daemon=True)
        self._log_reader.start()
        reader.start()
        reader.join(start_timeout_s)
        if not first_line or not first_line[0].startswith("{"):
            self.close()
            raise PeerError(f"llama.cpp did not start with {model}: {''.join(self._log[-20:]).strip() or 'no output'}")
        self.address: str = json.loads(first_line[0])["address"]
        self.build: str = json.loads(first_line[0])["version"]
        self._client = httpx.Client(base_url=self.address, timeout=600.0)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST a JSON body to the server and return its JSON answer. Raises PeerError on any status but 200."""
        response = self._client.post(path, json=body)
        if response.status_code != 200:
            raise PeerError(f"llama.cpp answered {response.status_code} to {path}: {response.text[:500]}")
        return response.json()

    def tokenize(self, text: str, *, parse_special: bool = True, add_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special, "add_special": add_special}
        return self.post("/tokenize", body)["tokens"]

    def detokenize(self, tokens: list[int]) -> str:
        return self.post("/detokenize", {"tokens": tokens})["content"]

    def next_token_logprobs(self, tokens: list[int], top: int, *, cache_prompt: bool = True) -> list[tuple[int, float]]:
        """The `top` most likely tokens after `tokens` with their natural log-probabilities before any sampler, falling.

        cache_prompt: go on from the longest prefix that the server still has; off, evaluate all tokens at once.

        The server drops the probabilities of a token that ends the text or leaves a character incomplete, so a bias
        forces a plain letter to be drawn; the reported probabilities are those before any bias.
        """
        if self._letter is None:
            self._letter = self.tokenize("a")[0]
        body = {"prompt": tokens, "n_predict": 1, "n_probs": top, "temperature": 0.0, "cache_prompt": cache_prompt}
        body["logit_bias"] = [[self._letter, 1000.0]]
        answer = self.post("/completion", body)
        return [(entry["id"], entry["logprob"]) for entry in answer["completion_probabilities"][0]["top_logprobs"]]

    def token_logprob(self, tokens: list[int], token: int) -> float:
        """Natural log-probability of `token` after `tokens`, before any sampler.

        A bias has it drawn, so that a text scored token by token is evaluated only once.
        """
        body = {"prompt": tokens, "n_predict": 1, "n_probs": 1, "temperature": 0.0, "cache_prompt": True}
        body["logit_bias"] = [[token, 1000.0]]
        answer = self.post("/completion", body)
        entries = answer.get("completion_probabilities") or []
        if len(entries) != 1 or entries[0]["id"] != token:
            raise PeerError(f"llama.cpp gave no probability of token {token}: {str(entries)[:200]}")
        return entries[0]["logprob"]

    def greedy(self, tokens: list[int], n_predict: int) -> list[int]:
        """Greedy continuation of `tokens`, `n_predict` tokens at most."""
        body = {
            "prompt": tokens,
            "n_predict": n_predict,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return self.post("/completion", body)["tokens"]

    def timings(self, tokens: list[int], n_predict: int) -> dict[str, float]:
        """The server's own timings of one uncached request that generates exactly `n_predict` tokens."""
        body = {"prompt": tokens, "n_predict": n_predict, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        return self.post("/completion", body)["timings"]

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_reader.join()
        self._process.stdout.close()
        self._process.stderr.close()

    def __enter__(self) -> LlamaCppPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self.close()


def serve() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--pooling")
    parser.add_argument("--context-shift", action="store_true")
    parser.add_argument("--lora", action="append", default=[])
    parser.add_argument("--f32-cache", action="store_true")
    parser.add_argument("--spec-type")
    parser.add_argument("--drafter", default="")
    parser.add_argument("--p-min", type=float, default=0.0)
    parser.add_argument("--n-draft", type=int, default=3)
    arguments = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the native code logs to standard output

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.n_ctx = arguments.ctx_size
    params.n_parallel = arguments.parallel
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads
    params.ctx_shift = arguments.context_shift
    if arguments.pooling is not None:
        params.embedding = True
        if arguments.pooling != "model":
            params.pooling_type = POOLING_TYPES[arguments.pooling]
    adapters = []
    for path in arguments.lora:
        adapter = xllamacpp.CommonAdapterLoraInfo(path, 1.0)
        adapters.append(adapter)
    params.lora_adapters = adapters
    if arguments.f32_cache:
        for cache in (params, params.speculative.draft):
            cache.cache_type_k = cache.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if arguments.spec_type is not None:
        name = "COMMON_SPECULATIVE_TYPE_" + arguments.spec_type.upper().replace("-", "_")
        params.speculative.types = [xllamacpp.common_speculative_type[name]]
        draft = params.speculative.draft
        draft.mparams.path = arguments.drafter
        draft.n_max = arguments.n_draft
        draft.p_min = arguments.p_min
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = arguments.threads
    params.fit_params = False
    params.verbosity = 1
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "version": xllamacpp.__version__}), file=answer, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve()
