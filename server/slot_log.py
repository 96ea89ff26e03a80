"""What the log says of a request that has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pyllama.server.speculation import log_drafts

if TYPE_CHECKING:
    from pyllama.server.generation import Generation
    from pyllama.server.slots import Slot

log = logging.getLogger("pyllama.server.slot")


def log_finished(slot: Slot, generation: Generation, timings: dict[str, Any]) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    log.info(
        "slot %2d | task %d | "
        "prompt eval time = %.2f ms / %d tokens (%.2f ms per token, %.2f tokens per second); "
        "eval time = %.2f ms / %d tokens (%.2f ms per token, %.2f tokens per second)",
        slot.id,
        generation.age,
        timings["prompt_ms"],
        timings["prompt_n"],
        timings["prompt_per_token_ms"],
        timings["prompt_per_second"],
        timings["predicted_ms"],
        timings["predicted_n"],
        timings["predicted_per_token_ms"],
        timings["predicted_per_second"],
    )
    log_drafts(slot.id, generation)
    log.info(
        "slot %2d | task %d | stop processing: n_tokens = %d, truncated = %d",
        slot.id,
        generation.age,
        len(slot.tokens),
        generation.truncated,
    )
