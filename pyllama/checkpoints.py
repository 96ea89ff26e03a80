"""Where it pays to keep a copy of a recurrent state, as pure functions of the tokens.

A recurrent state cannot be cut back. A later prompt that differs from what a sequence holds can go on only from a copy
of the state ("checkpoint") at or before the first difference. Prompts differ where somebody edited, regenerated or
stripped a message, so the borders of messages come first; pages at growing distances from the end bound what is lost
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAGE_TOKENS = 256
"""kPageTokens of the engine, for modules that must not import it."""

PROMPT_GRAIN = 64
"""Devices take a recurrent model's prompt in chunks that end at multiples of so many tokens (the engine's kDeltaChunk):
cut there it keeps its bits."""

MOST_BORDERS = 8
"""Checkpoints at borders of messages per prompt."""

TAIL_TOKENS = 4
"""A checkpoint near the end stays this far from it: the last tokens of a text change when the text goes on."""

MESSAGE_OPENERS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<|header_start|>",
    "<start_of_turn>",
    "<|turn>",
    "[INST]",
    "[SYSTEM_PROMPT]",
    "[TOOL_RESULTS]",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|start_of_role|>",
    "<|start|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "[|system|]",
    "[|user|]",
    "[|assistant|]",
)
"""Texts of the tokens with which chat templates of common models open a message."""


@dataclass(frozen=True, slots=True)
class CheckpointRule:
    """Positions worth a checkpoint; a position is the number of tokens before it.

    opening: tokens before which a message begins; ending: tokens after which one has ended.
    min_step: least distance between borders other than the last two of a prompt.
    """

    opening: frozenset[int] = frozenset()
    ending: frozenset[int] = frozenset()
    min_step: int = 8192

    def positions(self, tokens: Sequence[int], start: int = 0) -> list[int]:
        """Ascending positions in [max(start, 1), end - 1] while a prompt's `tokens` from `start` on are computed.

        Some token always follows the last position: the next one is drawn from its logits.
        """
        end = start + len(tokens)
        chosen = self._borders(tokens, start)
        first = max(start, 1)
        distance = PAGE_TOKENS
        while (page := (end - distance) // PAGE_TOKENS * PAGE_TOKENS) >= first:
            if not any(page <= position < page + PAGE_TOKENS for position in chosen):
                chosen.append(page)
            distance *= 2
        # A short prompt is within a page of its beginning as it is.
        if end > PAGE_TOKENS and all(position <= end - PAGE_TOKENS for position in chosen):
            chosen.append(max(end - TAIL_TOKENS, first))
        return sorted(position for position in chosen if first <= position < end)

    def _borders(self, tokens: Sequence[int], start: int) -> list[int]:
        """The last two borders, and older ones that are far enough apart, newest first."""
        end = start + len(tokens)
        opening = [start + i for i, token in enumerate(tokens) if token in self.opening]
        ending = [start + i + 1 for i, token in enumerate(tokens) if token in self.ending]
        borders = sorted({position for position in (*opening, *ending) if 1 <= position < end}, reverse=True)
        chosen = borders[:2]
        for position in borders[2:]:
            if len(chosen) == MOST_BORDERS:
                break
            if chosen[-1] - position >= self.min_step:
                chosen.append(position)
        return chosen


def checkpoint_rule(tokenizer: Any, min_step: int = 8192) -> CheckpointRule:
    """The rule for a vocabulary: tokens that open messages, found by their texts, and the one that begins a text.

    A vocabulary without such tokens marks the end of a message at most.
    """
    opening: set[int] = set()
    for text in MESSAGE_OPENERS:
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        if len(ids) == 1:
            opening.add(ids[0])
    ending = frozenset() if opening else frozenset(tokenizer.eog_ids)
    if tokenizer.bos_id is not None:
        opening.add(tokenizer.bos_id)
    return CheckpointRule(frozenset(opening), ending, min_step)


def cut_to_grain(n_held: int, n_tokens: int, grain: int) -> int:
    """At most `n_tokens`: behind the `n_held` before them they end at a multiple of `grain`. All, if none would be."""
    most = (n_held + n_tokens) // grain * grain - n_held
    return most if most > 0 else n_tokens
