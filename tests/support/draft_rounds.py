"""Texts drawn with and without a drafter, round after round, as an engine's user writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyllama._engine import DraftOrder, Engine, Sampler, Speculator, Work

N_VOCAB = 300  # of the tiny models


class Round(NamedTuple):
    history: list[int]
    last: int  # drawn, not computed yet
    draft: list[int]
    n_accepted: int


def undrafted(engine: Engine, prompt: Sequence[int], n_tokens: int, **sampling: Any) -> list[int]:
    """In sequence 0, which begins anew."""
    engine.clear(0)
    sampler = Sampler(N_VOCAB, **sampling)
    tokens: list[int] = []
    pending = list(prompt)
    while len(tokens) < n_tokens:
        (output,) = engine.step([Work(0, pending, sampler)])
        tokens.append(output.token)
        pending = [output.token]
    return tokens


def drafted(
    engine: Engine,
    kind: str | Sequence[str],
    prompts: Mapping[int, list[int]],
    n_tokens: int,
    *,
    most: int = 7,
    samples: bool = False,
    options: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> tuple[dict[int, list[int]], list[Round]]:
    """Texts of all sequences, and the rounds. kind: type or types of speculation; options: of the speculator."""
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    speculator = Speculator(engine, kinds, draft_n_max=most, draft_samples=samples, **(options or {}))
    samplers = {seq_id: Sampler(N_VOCAB, **sampling) for seq_id in prompts}
    texts: dict[int, list[int]] = {}
    for seq_id, prompt in prompts.items():
        (output,) = engine.step([Work(seq_id, prompt, samplers[seq_id])])
        texts[seq_id] = [output.token]
        speculator.begin(seq_id)
    rounds = []
    while any(len(text) < n_tokens for text in texts.values()):
        going = [seq_id for seq_id, text in texts.items() if len(text) < n_tokens]
        orders = [
            DraftOrder(seq_id, texts[seq_id][-1], most, sampling.get("temperature", 0.0), samplers[seq_id].seed)
            for seq_id in going
        ]
        drafts = dict(zip(going, speculator.draft(orders), strict=True))
        histories = {seq_id: prompts[seq_id] + texts[seq_id][:-1] for seq_id in going}
        outputs = engine.step(
            [
                Work(seq_id, [texts[seq_id][-1]], samplers[seq_id], draft=draft.tokens, proposals=draft.proposals)
                for seq_id, draft in drafts.items()
            ]
        )
        for seq_id, draft in drafts.items():
            new = [output.token for output in outputs if output.seq_id == seq_id]
            rounds.append(Round(histories[seq_id], texts[seq_id][-1], draft.tokens, len(new) - 1))
            texts[seq_id] += new
            if draft.tokens:
                speculator.accept(seq_id, len(draft.tokens), len(new) - 1)
    return {seq_id: text[:n_tokens] for seq_id, text in texts.items()}, rounds
