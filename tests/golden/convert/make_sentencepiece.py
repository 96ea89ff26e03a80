"""Makes `sentencepiece.model` and `sentencepiece_ids.json`: a small BPE model with byte fallback, and what it encodes.

Not part of the test run. Needs `pip install sentencepiece`; run from the repository's root:
    PYTHONPATH=tests python tests/golden/convert/make_sentencepiece.py
"""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece

from support.prompts import PROMPTS

HERE = Path(__file__).parent
VOCAB_SIZE = 600
TEXTS = (
    "Hello world",
    "the quick brown fox jumps over the lazy dog",
    "  two  spaces,\ta tab\nand a new line\n\n",
    "unseen: 漢字 é 😀 ß",
    "1234567890 + 3.14159 = ?",
    "don't they'll WE'VE",
    "",
    " ",
)


def main() -> None:
    lines = [line for text in PROMPTS.values() for line in text.splitlines()]
    model = HERE / "sentencepiece.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(model.with_suffix("")),
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        num_threads=1,
    )
    model.with_suffix(".vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = {text: processor.encode(text) for text in TEXTS}
    (HERE / "sentencepiece_ids.json").write_text(json.dumps(ids), encoding="ascii")


if __name__ == "__main__":
    main()
