"""What a turn of a conversation costs when its beginning is known, beside the same prompt computed whole.

    python scripts/bench/prefix_reuse.py MODEL.gguf [--messages 12] [--tokens 100] [--threads 2] [--repetitions 3]

For every repetition a new conversation of random tokens, timed until the first answered token: computed whole without
keeping states, computed whole with them (what cutting the prompt costs), an appended message, a second try, and an edit
three messages back. Prints medians, and seconds as a share of the prompt computed whole in the same repetition.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from pyllama import Llama
from pyllama.checkpoints import checkpoint_rule


def message(rng: random.Random, llm: Llama, n_tokens: int) -> list[int]:
    opening = min(checkpoint_rule(llm.tokenizer()).opening, default=0)
    end = max(200, llm.n_vocab() - 1000)  # special tokens stand at the end
    return [opening, *(rng.randrange(100, end) for _ in range(n_tokens - 1))]


def seconds(llm: Llama, prompt: Sequence[int]) -> float:
    """Until the first token is drawn."""
    started = time.perf_counter()
    with llm.generate(prompt, temp=0) as drawn:
        next(drawn)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--messages", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=100, help="of each message")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    n_ctx = (options.messages + 4) * options.tokens + 512
    shares: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    arguments = {"n_ctx": n_ctx, "n_batch": 512, "n_threads": options.threads}
    with Llama(options.model, **arguments, ctx_checkpoints=0) as plain, Llama(options.model, **arguments) as llm:
        for repetition in range(options.repetitions):
            rng = random.Random(repetition)
            messages = [message(rng, llm, options.tokens) for _ in range(options.messages)]
            prompt = [token for part in messages for token in part]
            edited = [token for part in messages[:-4] for token in part] + message(rng, llm, options.tokens)
            measured = {
                "computed whole": seconds(plain, prompt),
                "computed whole, states kept": seconds(llm, prompt),
                "one message appended": seconds(llm, prompt + message(rng, llm, options.tokens)),
                "second try": seconds(llm, prompt),
                "edit three messages back": seconds(llm, edited),
            }
            for name, value in measured.items():
                times.setdefault(name, []).append(value)
                shares.setdefault(name, []).append(value / measured["computed whole"])
    print(f"{len(prompt)} tokens in {options.messages} messages, {options.threads} threads, "
          f"medians of {options.repetitions}")  # fmt: skip
    for name, values in times.items():
        share = shares[name]
        print(
            f"{name:30} {statistics.median(values):8.3f} s   {statistics.median(share):6.1%} "
            f"({min(share):.1%} to {max(share):.1%})"
        )


if __name__ == "__main__":
    main()
