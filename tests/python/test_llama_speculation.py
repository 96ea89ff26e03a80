"""`Llama(draft_model=...)`: the same texts, whatever drafts, and how drafts are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import Llama, LlamaGrammar, LlamaPromptLookupDecoding, SpeculationOptions
from pyllama.errors import InvalidArgument
from pyllama.llama_sequence import TokenSequence
from support.tiny_hybrid import write_tiny_hybrid
from support.tiny_llama import write_tiny_llama

NGRAMS = SpeculationOptions(types=("ngram-simple", "ngram-mod"), ngram_simple=(2, 3), ngram_mod=(3, 1, 6))
GRAMMAR = LlamaGrammar.from_string('root ::= [a-z]+ ("." [a-z]+)? [.]', verbose=False)
PROMPTS = ("abcabcabcabcabcabc", "to be or not to be, that is the question", "x")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("speculation")
    return {
        "llama": write_tiny_llama(folder / "llama.gguf"),
        "qwen35": write_tiny_hybrid(folder / "qwen35.gguf", n_layer=5, attention_interval=3, n_mtp=1),
        "foreign": write_tiny_llama(folder / "foreign.gguf", seed=9),
    }


def answers(llama: Llama) -> Iterator[Any]:
    """Completions of all kinds, one after the other on one object, without what differs from call to call."""
    for prompt in PROMPTS:
        for temperature in (0.0, 0.9):
            common: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 40}
            repeating = {"grammar": GRAMMAR, "logit_bias": {97: 5.0, 98: 5.0}, "logprobs": 1}
            for more in (
                repeating,
                {},
                {"logprobs": 2},
                {"stop": ["e", "a"]},
                {"repeat_penalty": 1.3},
                {"max_tokens": 2},
            ):
                yield llama.create_completion(prompt, **{**common, **more})["choices"]
            yield "".join(
                chunk["choices"][0]["text"] for chunk in llama.create_completion(prompt, stream=True, **common)
            )
            stream = llama.create_completion(prompt, stream=True, **common)
            yield [next(stream)["choices"][0]["text"] for _ in range(3)]  # and then nobody wants more
            stream.close()
            yield llama.n_tokens


def kinds(paths: dict[str, Path], architecture: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "n-grams": NGRAMS,
        "the same model": SpeculationOptions(types=("draft-simple",), draft_model=str(paths[architecture]), n_max=5),
        "a foreign model": paths["foreign"],
        "prompt lookup": LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=4),
    }
    if architecture == "qwen35":
        found["its own block"] = SpeculationOptions(types=("draft-mtp",))
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_texts_are_those_without_a_draft_model(paths: dict[str, Path], architecture: str) -> None:
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False}
    with Llama(str(paths[architecture]), **options) as plain:
        expected = list(answers(plain))
    for kind, draft_model in kinds(paths, architecture).items():
        with Llama(str(paths[architecture]), draft_model=draft_model, **options) as llama:
            assert list(answers(llama)) == expected, kind


def generated(llama: Llama, seed: int) -> list[Any]:
    """What `generate` gives, and how many tokens the object says it holds, with tokens sent at random places."""
    rng, found = np.random.default_rng(seed), []
    sampling = {"temp": float(rng.choice([0.0, 0.9])), "top_k": 30, "repeat_penalty": 1.1}
    if seed % 3 == 0:
        sampling |= {"grammar": GRAMMAR}
    stream = llama.generate(llama.tokenize(PROMPTS[seed % 3].encode()), **sampling)
    try:
        token = next(stream)
        for _ in range(60):
            found += [token, llama.n_tokens]
            is_sent = seed % 3 != 0 and rng.random() < 0.15
            token = stream.send(rng.integers(3, 290, rng.integers(1, 4)).tolist()) if is_sent else next(stream)
    except StopIteration:
        pass
    stream.close()
    return [*found, llama.n_tokens]


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_generate_drafts_and_takes_tokens_that_are_sent(
    paths: dict[str, Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are sent take the rest of a round back, and the random numbers that it has used."""
    taken_back = []
    original = TokenSequence._draw_again

    def counted(sequence: TokenSequence, *arguments: Any) -> Any:
        taken_back.append(arguments)
        return original(sequence, *arguments)

    monkeypatch.setattr(TokenSequence, "_draw_again", counted)
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False, "seed": 4}
    with Llama(str(paths[architecture]), **options) as plain:
        expected = [generated(plain, seed) for seed in range(9)]
    for kind, draft_model in kinds(paths, architecture).items():
        with Llama(str(paths[architecture]), draft_model=draft_model, **options) as llama:
            for seed in range(9):
                assert generated(llama, seed) == expected[seed], (kind, seed)
    assert len(taken_back) > 5


def test_a_draft_model_that_is_always_right_saves_steps(paths: dict[str, Path]) -> None:
    asked: list[int] = []
    with Llama(str(paths["llama"]), n_ctx=512, n_threads=1, verbose=False) as plain:
        text = plain.tokenizer().encode("abc", add_special=True)
        stream = plain.generate(text, temp=0.0)
        known = [*text, *(next(stream) for _ in range(60))]
        stream.close()

    def oracle(input_ids: np.ndarray, **_: Any) -> np.ndarray:
        asked.append(len(input_ids))
        return np.array(known[len(input_ids) : len(input_ids) + 9], np.intc)

    with Llama(str(paths["llama"]), n_ctx=512, n_threads=1, verbose=False, draft_model=oracle) as llama:
        llama.create_completion(text, temperature=0.0, max_tokens=41)
    assert len(asked) <= 5


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
@pytest.mark.parametrize(
    "placement", [{}, {"devices": ("CPU1",)}, {"devices": ("CPU0", "CPU1")}, {"devices": ("CPU0",), "device_layers": 2}]
)
def test_drafts_beside_a_split_model_stand_as_beside_a_whole_one(
    paths: dict[str, Path], architecture: str, placement: dict[str, Any]
) -> None:
    """Also where the draft model is split otherwise than the model."""
    path = str(paths[architecture])
    options = SpeculationOptions(types=("draft-simple",), draft_model=path, n_max=5, placement=placement)
    for split in (
        {"devices": ("CPU0",)},
        {"devices": ("CPU0", "CPU1"), "split_mode": "layer"},
        {"devices": ("CPU0", "CPU1"), "split_mode": "tensor"},
        {"devices": ("CPU0",), "n_gpu_layers": 2},
    ):
        counts: list[tuple[int, int]] = []
        common: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "verbose": False, **split}
        with Llama(path, **common) as plain:
            expected = plain.create_completion("abc", temperature=0.0, max_tokens=40)["choices"]
        with Llama(path, draft_model=options, **common) as llama:
            assert llama._sequence is not None
            drafts: Any = llama._sequence._drafts
            on_verified = drafts.on_verified

            def count(n_drafted: int, n_accepted: int, on_verified: Any = on_verified, counts: Any = counts) -> None:
                counts.append((n_drafted, n_accepted))
                on_verified(n_drafted, n_accepted)

            drafts.on_verified = count
            assert llama.create_completion("abc", temperature=0.0, max_tokens=40)["choices"] == expected
        n_drafted, n_accepted = map(sum, zip(*counts, strict=True))
        assert n_accepted >= 0.9 * n_drafted > 20, split


def test_a_context_shift_goes_on_with_drafts(paths: dict[str, Path]) -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "verbose": False, "context_shift": True}
    texts = []
    for draft_model in (None, NGRAMS, LlamaPromptLookupDecoding()):
        with Llama(str(paths["llama"]), draft_model=draft_model, **options) as llama:
            stream = llama.create_completion("abcabcabc", temperature=0.0, max_tokens=-1, stream=True)
            texts.append("".join(next(stream)["choices"][0]["text"] for _ in range(400)))
            stream.close()
    assert texts[1:] == texts[:1] * 2


def test_what_is_no_draft_model_is_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    for draft_model, message in (
        (5, "draft_model is a int"),
        (str(tmp_path / "missing.gguf"), "there is no file"),
        (SpeculationOptions(types=("draft-mtp",)), "block of multi-token prediction"),
        (SpeculationOptions(types=("guess",)), "'guess' is not a type"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            Llama(str(paths["llama"]), verbose=False, draft_model=draft_model)
    with pytest.raises(InvalidArgument, match="must be 1 or more"):
        LlamaPromptLookupDecoding(0)


def test_prompt_lookup_finds_the_longest_n_gram_first() -> None:
    lookup = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=2)
    assert lookup(np.array([1, 2, 3, 4, 9, 3, 5, 1, 2, 3], np.intc)).tolist() == [4, 9]
    assert lookup(np.array([3, 7, 8, 3], np.intc)).tolist() == [7, 8]
    assert lookup(np.array([1, 2, 3], np.intc)).tolist() == []
    assert lookup(np.array([1], np.intc)).tolist() == []
