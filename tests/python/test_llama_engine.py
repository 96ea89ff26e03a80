"""`Llama` on the native engine with a tiny model: both ways of drawing agree, states, limits, threads, memory."""

from __future__ import annotations

import gc
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import ContextFull, GgufError, InvalidArgument, LlamaGrammar, ModelError
from pyllama.llama import Llama

PROMPT = "the world is an island and"


@pytest.fixture
def llm(tiny_llama_path: Path) -> Iterator[Llama]:
    with Llama(tiny_llama_path, n_ctx=512, n_threads=1) as opened:
        yield opened


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc/self/status")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.3, "seed": 5},
        {"temperature": 0.9, "seed": 6, "repeat_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 2.0, "seed": 7, "top_k": 3, "min_p": 0.0, "top_p": 0.9},
        {"temperature": 1.0, "seed": 8, "logit_bias": {40: 5.0, 41: False}},
    ],
)
def test_drawing_in_the_engine_and_from_logits_give_the_same_answer(llm: Llama, options: dict[str, Any]) -> None:
    """A logits processor that changes nothing makes the object draw from copied logits."""
    in_engine = llm(PROMPT, max_tokens=30, logprobs=3, **options)["choices"]
    from_logits = llm(PROMPT, max_tokens=30, logprobs=3, logits_processor=lambda ids, row: row, **options)["choices"]
    assert in_engine[0]["text"] == from_logits[0]["text"]
    for name in ("tokens", "text_offset"):
        assert in_engine[0]["logprobs"][name] == from_logits[0]["logprobs"][name]
    assert in_engine[0]["logprobs"]["token_logprobs"] == pytest.approx(
        from_logits[0]["logprobs"]["token_logprobs"], abs=1e-5
    )
    for a, b in zip(in_engine[0]["logprobs"]["top_logprobs"], from_logits[0]["logprobs"]["top_logprobs"], strict=True):
        assert list(a) == list(b)


def test_logprobs_without_alternatives_are_those_with(llm: Llama) -> None:
    none, three = (llm(PROMPT, max_tokens=5, temperature=0, logprobs=n)["choices"][0]["logprobs"] for n in (0, 3))
    assert none["token_logprobs"] == three["token_logprobs"]
    assert all(value < 0 for value in none["token_logprobs"])


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
@pytest.mark.parametrize("stop", [None, ["e", "zz"], ["\n"]])
def test_streamed_text_is_the_plain_text(llm: Llama, options: dict[str, Any], stop: Any) -> None:
    plain = llm(PROMPT, max_tokens=40, stop=stop, echo=True, **options)["choices"][0]
    chunks = list(llm(PROMPT, max_tokens=40, stop=stop, echo=True, stream=True, **options))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["finish_reason"]


def test_reused_prefix_gives_the_bits_of_a_fresh_object(llm: Llama, tiny_llama_path: Path) -> None:
    prompts = [llm.tokenize(text.encode()) for text in (PROMPT * 4, PROMPT * 2, PROMPT * 4 + " you", PROMPT)]
    for prompt in prompts:
        next(llm.generate(prompt, temp=0))
        llm.n_tokens = len(prompt)
        reused = llm.sample(temp=0), llm.scores[-1].copy()
        with Llama(tiny_llama_path, n_ctx=512, n_threads=1, n_batch=7) as fresh:
            fresh.eval(prompt)
            assert np.array_equal(fresh.scores[-1], reused[1])
            assert fresh.sample(temp=0) == reused[0]


def test_echoed_probabilities_match_the_scores(tiny_llama_path: Path) -> None:
    with Llama(tiny_llama_path, n_threads=1, n_batch=8) as llm:
        logprobs = llm(PROMPT, max_tokens=1, echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
    with Llama(tiny_llama_path, n_threads=1, logits_all=True) as llm:
        tokens = llm.tokenize(PROMPT.encode())
        llm.eval(tokens)
        rows = np.asarray(llm.scores).astype(np.float64)
    rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
    assert logprobs[0] is None
    assert logprobs[1 : len(tokens)] == pytest.approx([rows[i, token] for i, token in enumerate(tokens[1:])], abs=1e-9)


def test_saved_state_goes_on_identically_in_another_object(llm: Llama, tiny_llama_path: Path) -> None:
    llm(PROMPT, max_tokens=20, temperature=0)
    state = llm.save_state()
    llm.set_seed(4)
    expected = list(itertools.islice(llm.generate([], temp=1.1, reset=False), 20))
    with Llama(tiny_llama_path, n_ctx=128, n_threads=1) as other:
        other.load_state(state)
        assert list(other.eval_tokens) == list(state.input_ids)
        other.set_seed(4)
        assert list(itertools.islice(other.generate([], temp=1.1, reset=False), 20)) == expected


def test_state_of_another_cache_type_is_refused(llm: Llama, tiny_llama_path: Path) -> None:
    llm.eval(llm.tokenize(PROMPT.encode()))
    with Llama(tiny_llama_path, type_k="f32", type_v=30) as other:
        with pytest.raises(InvalidArgument):
            other.load_state(llm.save_state())
        assert other.n_tokens == 0
        assert other(PROMPT, max_tokens=3)["usage"]["completion_tokens"] <= 3


def test_state_size_follows_the_tokens_not_the_context(tiny_llama_path: Path) -> None:
    sizes = {}
    for n_ctx in (512, 2048):
        with Llama(tiny_llama_path, n_ctx=n_ctx) as llm:
            for n_tokens in (100, 300):
                llm.n_tokens = 0
                llm.eval([40 + i % 50 for i in range(n_tokens)])
                sizes[n_ctx, n_tokens] = llm.save_state().llama_state_size
    assert sizes[512, 100] == sizes[2048, 100]
    assert sizes[512, 300] == sizes[2048, 300]
    assert sizes[512, 300] < 3.2 * sizes[512, 100]


def test_context_is_filled_to_the_last_token(tiny_llama_path: Path) -> None:
    with Llama(tiny_llama_path, n_ctx=256, n_threads=1) as llm:
        n_ctx = llm.n_ctx()
        eos = {llm.token_eos(): False, 0: False}  # the model shall not end by itself
        prompt = llm.tokenize(PROMPT.encode())
        response = llm(prompt, max_tokens=None, logit_bias=eos)
        assert response["usage"]["total_tokens"] == n_ctx
        assert response["choices"][0]["finish_reason"] == "length"
        with pytest.raises(ContextFull):
            llm.eval([40] * (n_ctx - llm.n_tokens + 1))
        llm.eval([40] * (n_ctx - llm.n_tokens))
        assert llm.n_tokens == n_ctx


def test_eight_threads_of_twenty_calls_get_their_own_answers(llm: Llama) -> None:
    prompts = [f"{PROMPT} {index}" for index in range(12)]
    answers = {prompt: llm(prompt, max_tokens=8, temperature=0)["choices"][0]["text"] for prompt in prompts}

    def work(index: int) -> None:
        choose = random.Random(index)
        for _ in range(20):
            prompt = choose.choice(prompts)
            if choose.random() < 0.5:
                with llm(prompt, max_tokens=8, temperature=0, stream=True) as stream:
                    text = "".join(
                        chunk["choices"][0]["text"] for chunk in itertools.islice(stream, choose.choice([1, 4, 100]))
                    )
                assert answers[prompt].startswith(text)
            else:
                assert llm(prompt, max_tokens=8, temperature=0)["choices"][0]["text"] == answers[prompt]

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, index) for index in range(8)]:
            future.result(120)


def test_file_that_is_no_model_raises_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(50))
    with pytest.raises((GgufError, ModelError)):
        Llama(path)


@pytest.mark.parametrize("fault", [None, {"type_k": "q4_k"}, {"kv_overrides": {"tokenizer.ggml.model": "nothing"}}])
def test_fifty_loads_leave_no_memory_behind(tiny_llama_path: Path, fault: dict[str, Any] | None) -> None:
    """Closed, dropped, or refused by the constructor, after the weights were loaded."""

    def load(index: int) -> None:
        if fault is not None:
            with pytest.raises(Exception, match=r"q4_K|nothing"):
                Llama(tiny_llama_path, **fault)
        elif index % 2:
            with Llama(tiny_llama_path, n_ctx=2048) as llm:
                llm(PROMPT, max_tokens=2)
        else:
            llm = Llama(tiny_llama_path, n_ctx=2048)
            llm(PROMPT, max_tokens=2)
            del llm

    for index in range(10):
        load(index)
    gc.collect()
    before = resident_bytes()
    for index in range(50):
        load(index)
    gc.collect()
    grown = resident_bytes() - before
    # The weights alone are 0.5 MB: fifty of them would be 25 MB.
    assert grown < 8 << 20, f"grew by {grown / 2**20:.1f} MiB"


def test_a_grammar_forces_a_text_and_what_follows_is_free_again(llm: Llama) -> None:
    free = llm(PROMPT, max_tokens=10, temperature=0)["choices"][0]["text"]
    text = 'any "text" é😀'
    grammar = LlamaGrammar.from_string(r'root ::= "any \"text\" é😀"')
    for options in ({}, {"logits_processor": lambda ids, row: row}, {"logprobs": 2}):
        answer = llm(PROMPT, max_tokens=100, grammar=grammar, **options)["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (text, "stop")
    chunks = llm(PROMPT, max_tokens=100, grammar=grammar, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    tokens = list(llm.generate(llm.tokenize(PROMPT.encode()), grammar=grammar))
    assert llm.detokenize(tokens).decode() == text
    assert llm(PROMPT, max_tokens=10, temperature=0)["choices"][0]["text"] == free


def test_a_schema_with_references_between_definitions_is_kept_to(llm: Llama) -> None:
    """Known fault D15."""
    schema = {
        "$defs": {
            "pair": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "minItems": 2, "maxItems": 2},
            "colour": {"enum": ["r", "g"]},
        },
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/pair"}, "c": {"$ref": "#/$defs/colour"}},
        "required": ["p", "c"],
    }
    grammar = LlamaGrammar.from_json_schema(json.dumps(schema))
    for seed in range(10):
        value = json.loads(
            llm(PROMPT, max_tokens=200, temperature=1.5, seed=seed, grammar=grammar)["choices"][0]["text"]
        )
        assert set(value["p"]) | {value["c"]} <= {"r", "g"}
        assert len(value["p"]) == 2


def test_a_grammar_that_cannot_be_kept_to_is_refused_at_once(llm: Llama) -> None:
    wrong = LlamaGrammar.from_json_schema({"type": "array", "uniqueItems": True})
    for stream in (False, True):
        with pytest.raises(InvalidArgument, match="uniqueItems"):
            llm(PROMPT, grammar=wrong, stream=stream)
    with pytest.raises(TypeError, match="LlamaGrammar"):
        llm(PROMPT, grammar='root ::= "a"')
    assert llm(PROMPT, max_tokens=1)["choices"]
