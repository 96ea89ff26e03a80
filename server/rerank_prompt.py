"""The prompt that a reranker scores: the query and one document, laid out as the model's file says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TEMPLATE_KEY = "tokenizer.chat_template.rerank"
_PLACEHOLDER = re.compile(r"\{(query|document)\}")


class RerankPrompt:
    """`template`: text with ``{query}`` and ``{document}``; None separates both with the vocabulary's special tokens.

    adds_sep: the vocabulary puts its separator between two texts.
    """

    def __init__(self, tokenizer: Any, template: str | None, *, adds_sep: bool = False) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._adds_sep = adds_sep

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Any) -> RerankPrompt:
        template = metadata.get(TEMPLATE_KEY)
        return cls(
            tokenizer,
            template if isinstance(template, str) else None,
            adds_sep=metadata.get("tokenizer.ggml.add_sep_token") is True,
        )

    def tokens(self, query: str, document: str) -> list[int]:
        """What is filled in is never searched for placeholders. Special tokens count in a template's prompt only."""
        tokenizer = self._tokenizer
        if self._template is not None:
            texts = {"query": query, "document": document}
            text = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._template)
            return tokenizer.encode(text, add_special=False, parse_special=True)
        eos = tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        end = [eos] if tokenizer.add_eos and eos is not None else []
        middle = [tokenizer.sep_id] if self._adds_sep and tokenizer.sep_id is not None else []
        return [
            *begin,
            *tokenizer.encode(query, add_special=False, parse_special=False),
            *end,
            *middle,
            *tokenizer.encode(document, add_special=False, parse_special=False),
            *end,
        ]
