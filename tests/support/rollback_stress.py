"""Sequences that verify draft after draft, right up to random places, against sequences decoded token by token."""

from __future__ import annotations

import random

import numpy as np

from pyllama._engine import Engine, Model, Sampler, Work

LENGTH = 512  # whole pages: nothing of a refused draft is left behind the end


def planted(rng: random.Random, expected: list[int], at: int, n_vocab: int, longest: int) -> list[int]:
    """A draft of random length that is right up to a random place."""
    draft = expected[at : at + rng.randint(0, longest)]
    n_right = rng.randint(0, len(draft))
    return draft[:n_right] + [(token + rng.randint(1, n_vocab - 1)) % n_vocab for token in draft[n_right:]]


def random_prompt(model: Model, n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, min(model.n_vocab, 290), n_tokens).tolist()


def stress(model: Model, n_drafts: int, seed: int = 3) -> int:
    """Verify at least `n_drafts` drafts of two sequences in one batch; how many there were.

    Raises AssertionError where a token, or anything that is kept of a sequence at the end of a text, is another.
    """
    rng, found = random.Random(seed), 0
    options = {"n_ctx": 1024, "n_seq_max": 4, "n_ubatch": 64, "n_threads": 1}
    engine, straight = Engine(model, **options), Engine(model, **options)
    sampler = Sampler(model.n_vocab, temperature=0.0)
    run = 0
    while found < n_drafts:
        n_prompt = 6 + run
        texts = [random_prompt(model, n_prompt, seed=100 * run + seq_id) for seq_id in range(2)]
        for seq_id, text in enumerate(texts):
            straight.clear(seq_id)
            engine.clear(seq_id)
            pending = list(text)
            for _ in range(LENGTH):
                (output,) = straight.step([Work(seq_id, pending, sampler)])
                pending = [output.token]
                text.append(output.token)
        found += _verify_drafts(model, engine, sampler, texts, n_prompt, rng)
        for seq_id, text in enumerate(texts):
            straight.clear(seq_id)
            straight.decode(text[:16], [seq_id] * 16)
            for token in text[16:LENGTH]:
                straight.decode([token], [seq_id])
            assert engine.length(seq_id) == straight.length(seq_id) == LENGTH
            is_equal = engine.save_sequence(seq_id) == straight.save_sequence(seq_id)
            assert is_equal, f"text {run} of sequence {seq_id} left another state"
        run += 1
    engine.close()
    straight.close()
    return found


def _verify_drafts(
    model: Model, engine: Engine, sampler: Sampler, texts: list[list[int]], n_prompt: int, rng: random.Random
) -> int:
    """Both texts up to `LENGTH`, with drafts."""
    found, held = 0, [n_prompt, n_prompt]
    engine.step([Work(seq_id, text[:n_prompt]) for seq_id, text in enumerate(texts)])
    while min(held) < LENGTH:
        work = []
        for seq_id, text in enumerate(texts):
            n_past = held[seq_id]
            if n_past < LENGTH:
                draft = planted(rng, text, n_past + 1, model.n_vocab, min(3, LENGTH - n_past - 1))
                work.append(Work(seq_id, [text[n_past]], sampler, draft=draft))
                found += bool(draft)
        for output in engine.step(work):
            held[output.seq_id] += 1
            expected = texts[output.seq_id][held[output.seq_id]]
            assert output.token == expected, f"token {held[output.seq_id]} is {output.token}, expected {expected}"
    return found
