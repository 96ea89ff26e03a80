"""What the end of a prompt says about the thinking block of the answer. Pure."""

from __future__ import annotations

from pyllama.chat.reasoning_split import PromptEnd, ReasoningTags, prompt_end
from pyllama.grammar.guide import ThinkingGate, ThinkingRules


def thinking_rules(prompt: str, given: str, tags: ReasoningTags, *, may_open: bool = True) -> ThinkingRules | None:
    """The block that the answer begins with, or may begin with; None when that is past.

    prompt: up to the answer. given: what the prompt holds of the answer besides. may_open: the model may begin a block.
    """
    end = prompt_end(prompt, tags)
    if end is PromptEnd.CLOSED:
        return None
    if end is PromptEnd.OPEN:
        rules = ThinkingRules(tags.start, tags.end, is_open=True, so_far=prompt[prompt.rindex(tags.start) :])
        rules = ThinkingRules(tags.start, tags.end, is_open=True, so_far=rules.so_far[len(tags.start) :] + given)
        return None if tags.end in rules.so_far else rules
    if not given.strip():
        return ThinkingRules(tags.start, tags.end, may_open=may_open) if may_open else None
    gate = ThinkingGate(ThinkingRules(tags.start, tags.end))
    gate.push(given.encode())
    if gate.is_over:
        return None
    if not gate.is_inside:  # the beginning of a tag, if the model will have it so
        return None
    return ThinkingRules(tags.start, tags.end, is_open=True, so_far=given.lstrip()[len(tags.start) :])
