"""What the engine loop is told once: sizes, limits and what the model can."""

from __future__ import annotations

from dataclasses import dataclass

from pyllama.checkpoints import CheckpointRule


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`n_batch` is raised to hold one row of every slot and one prompt token. `max_queue`: waiting prompts.

    max_passes: while every sequence generates and nothing waits, up to that many tokens of each are drawn in one engine
    step, as long as the step lasts no longer than a sixtieth of a second: on a small model the work between two steps
    would otherwise cost several per cent.
    adds_bos: the vocabulary begins prompts with a token of its own, which a context shift keeps too.
    n_embedding_rows: tokens of texts to embed per iteration while sequences generate, `n_batch` otherwise.
    checkpoints: where states are kept, for models that go back in a sequence by them: recurrent ones, sliding windows.
    prefill_pace: per cent of the time that prompt tokens may take while something generates; 0 and 100: any.
    sleep_seconds: after so long without work the engine is closed, and made again for the next work; 0: never.
    prompt_grain: prompts that are computed in several steps are cut at multiples of so many tokens.
    can_cut: a sequence can be cut back by a few tokens without one; where it cannot, max_passes is 1.
    """

    n_slots: int
    n_ctx_slot: int
    n_batch: int = 2048
    similarity: float = 0.1
    mixes_prompts: bool = True
    max_queue: int = 1024
    max_passes: int = 1
    n_embedding_rows: int = 512
    adds_bos: bool = False
    checkpoints: CheckpointRule | None = None
    prompt_grain: int = 1
    can_cut: bool = True
    prefill_pace: int = 0
    sleep_seconds: float = 0
