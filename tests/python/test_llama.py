"""`Llama` against an engine without weights: arguments, text, responses, prefix reuse, state, errors, end of life.

The native engine is replaced by `support.fake_engine`; tests/models/test_llama_smollm2.py runs the real one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyllama import llama as llama_module
from pyllama import llama_sequence
from pyllama.errors import ContextFull, InvalidArgument, OutOfMemory, PyllamaError, TemplateError, TokenizerError
from pyllama.llama import Llama
from support import fake_engine
from support.fake_engine import IM_END, IM_START, N_VOCAB, byte_tokens


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module in (llama_module, llama_sequence):
        monkeypatch.setattr(module, "_engine", fake_engine)
    fake_engine.reset()
    live = fake_engine.Model.live, fake_engine.Engine.live
    yield fake_engine
    fake_engine.reset()
    gc.collect()
    assert (fake_engine.Model.live, fake_engine.Engine.live) == live, "a test left an engine open"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.touch()
    return file


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    with Llama(path, n_ctx=256, n_batch=16) as opened:
        yield opened


def native(llm: Llama) -> fake_engine.Engine:
    return llm._sequence.engine  # type: ignore[union-attr, return-value]


def force(text: str | bytes) -> None:
    """Make the model answer `text`, byte by byte, after a prompt that ends in ``>``."""
    fake_engine.Model.answer = byte_tokens(text)


def streamed_text(chunks: Any) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


# -------------------------------------------------------------------------------- constructor


def test_arguments_reach_the_engine(path: Path) -> None:
    with Llama(path, n_ctx=0, n_ubatch=999, n_batch=64, n_threads=3, n_threads_batch=None, type_k=8, type_v="Q4_0",
               rope_scaling_type=2, rope_freq_base=5e5, yarn_orig_ctx=77, n_gpu_layers=-1, use_mlock=True,
               flash_attn=True, tensor_split=[1.0], kv_overrides={"general.name": "other"}) as llm:  # fmt: skip
        assert llm.n_ctx() == 2048
        options = native(llm).options
        assert native(llm).n_batch == 64
        assert (options["n_ubatch"], options["n_threads"], options["n_threads_batch"]) == (64, 3, 0)
        assert (options["type_k"], options["type_v"], options["rope_scaling_type"]) == ("q8_0", "q4_0", "yarn")
        assert (options["rope_freq_base"], options["yarn_orig_ctx"]) == (5e5, 77)
        assert llm.metadata["general.name"] == "other"


@pytest.mark.parametrize(
    "argument",
    [
        {"pooling_type": 5}, {"lora_base": "x"}, {"draft_model": object()}, {"tokenizer": object()},
        {"chat_handler": object()}, {"spm_infill": True}, {"pooling_type": "rank"}, {"n_ctx": -1}, {"n_batch": 0},
        {"n_threads": -2}, {"type_k": 4}, {"rope_scaling_type": 9}, {"last_n_tokens_size": -1},
    ],
)  # fmt: skip
def test_argument_that_cannot_be_met_is_named(path: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(argument))):
        Llama(path, **argument)


def test_unknown_argument_is_a_type_error(path: Path) -> None:
    with pytest.raises(TypeError, match="n_contex"):
        Llama(path, n_contex=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("argument", [{"n_ctx": 1.5}, {"n_batch": "8"}, {"seed": "x"}, {"n_threads": 1.0}])
def test_argument_of_a_wrong_type_is_a_type_error(path: Path, argument: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(argument))):
        Llama(path, **argument)


def test_model_path_must_exist_and_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no file .*missing\.gguf"):
        Llama(tmp_path / "missing.gguf")
    with pytest.raises(TypeError):
        Llama(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [OutOfMemory("KV pages"), KeyboardInterrupt()])
def test_exception_in_the_constructor_gives_the_weights_back(path: Path, fault: BaseException) -> None:
    live = fake_engine.Model.live
    fake_engine.Engine.fail_with = fault  # type: ignore[assignment]
    with pytest.raises(type(fault)):
        Llama(path)
    assert fake_engine.Model.live == live


def test_unusable_vocabulary_gives_the_weights_back(path: Path) -> None:
    live = fake_engine.Model.live
    with pytest.raises(TokenizerError):
        Llama(path, kv_overrides={"tokenizer.ggml.model": "no-such-model"})
    assert fake_engine.Model.live == live


def test_vocab_only_tokenizes_and_refuses_to_compute(path: Path) -> None:
    with Llama(path, vocab_only=True) as llm:
        assert llm.detokenize(llm.tokenize(b"hello world")) == b"hello world"
        assert (llm.n_vocab(), llm.n_embd(), llm.n_tokens) == (N_VOCAB, 64, 0)
        for call in (lambda: llm("x"), lambda: llm.eval([1]), llm.reset, lambda: llm.generate([1])):
            with pytest.raises(InvalidArgument, match="vocab_only"):
                call()
    assert fake_engine.Engine.live == 0


def test_from_pretrained_says_it_is_not_supported_yet() -> None:
    with pytest.raises(InvalidArgument, match="not supported yet"):
        Llama.from_pretrained("someone/some-model", filename="*.gguf")


def test_facts_about_the_model(llm: Llama) -> None:
    assert (llm.n_ctx(), llm.n_vocab(), llm.n_embd()) == (256, N_VOCAB, 64)
    assert (llm.token_bos(), llm.token_eos()) == (IM_START, IM_END)
    assert llm.token_nl() == byte_tokens("\n")[0]
    metadata = llm.metadata
    assert metadata["llama.context_length"] == "2048"
    assert metadata["tokenizer.ggml.add_bos_token"] == "false"
    assert "tokenizer.ggml.tokens" not in metadata


# -------------------------------------------------------------------------------- tokens


def test_tokenize_and_detokenize_bytes(llm: Llama) -> None:
    data = "the wörld 😀".encode() + b"\xff"
    assert llm.detokenize(llm.tokenize(data)) == data
    assert llm.tokenize(b"<|im_end|>", special=True) == [IM_END]
    assert IM_END not in llm.tokenize(b"<|im_end|>")
    assert llm.detokenize([IM_END]) == b""
    assert llm.detokenize([IM_END], special=True) == b"<|im_end|>"


@pytest.mark.parametrize("text", ["str", None, 3])
def test_tokenize_takes_bytes_only(llm: Llama, text: Any) -> None:
    with pytest.raises(TypeError, match="bytes"):
        llm.tokenize(text)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([N_VOCAB], InvalidArgument),
        ([-1], InvalidArgument),
        ([1.5], TypeError),
        ("ab", TypeError),
        (None, TypeError),
        (7, TypeError),
    ],
)
def test_wrong_token_ids_are_refused_everywhere(llm: Llama, tokens: Any, error: type[Exception]) -> None:
    for call in (llm.detokenize, llm.eval, llm.generate) + (
        (llm.create_completion,) if not isinstance(tokens, str) else ()
    ):
        with pytest.raises(error):
            call(tokens)
    assert llm.n_tokens == 0


# -------------------------------------------------------------------------------- completions


def test_response_has_the_openai_shape(llm: Llama) -> None:
    force("hello")
    response = llm("say>", max_tokens=10, temperature=0)
    assert response["id"].startswith("cmpl-")
    assert response["object"] == "text_completion"
    assert response["model"] == llm.model_path
    assert isinstance(response["created"], int)
    assert response["choices"] == [{"text": "hello", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert response["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    json.dumps(response)


def test_stream_chunks_have_the_openai_shape(llm: Llama) -> None:
    force("hello")
    chunks = list(llm("say>", max_tokens=10, temperature=0, stream=True, model="name"))
    assert {(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "text_completion", "name")
    }
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["h", "e", "l", "l", "o", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 16])
@pytest.mark.parametrize("stop", [None, "lo", ["zz", "llo w", "o"], ["ö"], ""])
@pytest.mark.parametrize("echo", [False, True])
def test_streamed_text_is_the_plain_text(llm: Llama, max_tokens: int, stop: Any, echo: bool) -> None:
    force("hello wörld 😀")
    options = {"max_tokens": max_tokens, "stop": stop, "echo": echo, "temperature": 0}
    plain = llm("say>", **options)["choices"][0]
    chunks = list(llm("say>", stream=True, **options))
    assert streamed_text(chunks) == plain["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["finish_reason"]


def test_limit_is_reported_as_length(llm: Llama) -> None:
    force("hello")
    for max_tokens, text, reason in ((3, "hel", "length"), (5, "hello", "length"), (6, "hello", "stop")):
        choice = llm("say>", max_tokens=max_tokens, temperature=0)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize("max_tokens", [None, 0, -1, 10_000])
def test_without_a_limit_the_answer_fills_the_context(llm: Llama, max_tokens: int | None) -> None:
    force("x" * 1000)
    response = llm("say>", max_tokens=max_tokens, temperature=0)
    assert response["usage"]["completion_tokens"] == 256 - 4
    assert response["choices"][0]["finish_reason"] == "length"
    assert llm.n_tokens == 255


def test_stop_string_across_tokens_never_leaks(llm: Llama) -> None:
    force("The quick brown fox jumps")
    choice = llm("say>", stop=["own fox"], max_tokens=50, temperature=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The quick br", "stop")
    shown = ""
    for chunk in llm("say>", stop=["own fox"], max_tokens=50, temperature=0, stream=True):
        shown += chunk["choices"][0]["text"]
        assert "The quick br".startswith(shown)


def test_characters_of_several_bytes_arrive_whole(llm: Llama) -> None:
    force("😀é")
    texts = [chunk["choices"][0]["text"] for chunk in llm("say>", temperature=0, stream=True)]
    assert texts == ["😀", "é", ""]
    assert llm("say>", max_tokens=2, temperature=0)["choices"][0]["text"] == "\ufffd"


def test_token_list_prompt_and_echo(llm: Llama) -> None:
    force("ok")
    response = llm(byte_tokens("say>"), echo=True, temperature=0)
    assert response["choices"][0]["text"] == "say>ok"
    assert response["usage"]["prompt_tokens"] == 4


def test_special_tokens_in_a_prompt_are_parsed(llm: Llama) -> None:
    assert llm("<|im_start|>a>", max_tokens=1)["usage"]["prompt_tokens"] == 3


def test_empty_prompt_begins_with_bos(llm: Llama) -> None:
    assert llm("", max_tokens=2)["usage"]["prompt_tokens"] == 1
    assert llm.eval_tokens[0] == IM_START


@pytest.mark.parametrize("length", [256, 300])
def test_prompt_that_does_not_fit_is_refused_before_streaming(llm: Llama, length: int) -> None:
    for stream in (False, True):
        with pytest.raises(InvalidArgument, match=f"prompt has {length} tokens.*n_ctx=256"):
            llm(byte_tokens("x" * length), stream=stream)


@pytest.mark.parametrize(
    "option",
    [
        {"suffix": "x"}, {"typical_p": math.nan}, {"tfs_z": 0.9}, {"mirostat_mode": 3},
        {"dynatemp_range": math.inf}, {"samplers": ["tfs_z"]},
        {"temperature": math.nan}, {"top_p": math.inf}, {"repeat_penalty": 0}, {"repeat_penalty": 5e-324},
        {"presence_penalty": math.inf},
        {"logprobs": -1}, {"logit_bias": {"x": 1}}, {"logit_bias": {1: math.nan}}, {"logit_bias": {1: "many"}},
    ],
)  # fmt: skip
def test_completion_option_out_of_range_is_named(llm: Llama, option: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(InvalidArgument, match=next(iter(option))):
            llm("say>", stream=stream, **option)
    assert llm("say>", max_tokens=1)["choices"]  # the object is usable afterwards


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": "hot"}, {"top_k": 1.5}, {"max_tokens": "3"}, {"stop": [1]}, {"seed": 1.5}, {"logit_bias": [1]},
        {"logits_processor": 3}, {"logprobs": "5"}, {"top_p": None}, {"unknown_option": 1},
    ],
)  # fmt: skip
def test_completion_option_of_a_wrong_type_is_a_type_error(llm: Llama, option: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(TypeError):
            llm("say>", stream=stream, **option)


def test_neutral_values_of_options_to_come_are_accepted(llm: Llama) -> None:
    llm("say>", max_tokens=1, typical_p=1, tfs_z=1, mirostat_mode=0, mirostat_tau=3.0, mirostat_eta=0.5, suffix=None)


def test_sampling_options_reach_the_sampler(path: Path) -> None:
    with Llama(path, last_n_tokens_size=5) as llm:
        llm("say>", temperature=-3, top_k=-1, repeat_penalty=1.5, logit_bias={"7": False, 9: 2}, seed=-1, max_tokens=1)
        sampler = fake_engine.Sampler.created[-1]
        assert (sampler.temperature, sampler.top_k, sampler.repeat_last_n, sampler.repeat_penalty) == (0, 0, 5, 1.5)
        assert sampler.logit_bias == ((7, -math.inf), (9, 2.0))


def test_every_sampler_of_the_engine_can_be_asked_for_by_name(llm: Llama) -> None:
    options = {
        "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0, "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3,
        "dry_penalty_last_n": 100, "adaptive_target": 0.5, "adaptive_decay": 0.5, "min_keep": 2,
        "samplers": ("dry", "xtc", "adaptive_p"),
    }  # fmt: skip
    llm("say>", typical_p=0.5, mirostat_tau=4.0, mirostat_eta=0.2, max_tokens=1, **options)
    found = fake_engine.Sampler.created[-1].others
    assert found["dry_breakers"] is not None
    expected = {**options, "typical_p": 0.5, "mirostat": 0, "mirostat_tau": 4.0, "mirostat_eta": 0.2}
    assert {name: found[name] for name in expected} == expected
    llm("say>", mirostat_mode=2, max_tokens=1, dry_multiplier=1.0)
    assert fake_engine.Sampler.created[-1].others["mirostat"] == 2
    assert fake_engine.Sampler.created[-1].others["dry_breakers"] is None
    with pytest.raises(TypeError, match="no_such_sampler"):
        llm("say>", no_such_sampler=1)


def test_sampler_history_is_prompt_and_answer(llm: Llama) -> None:
    force("ok")
    for _ in range(2):  # the second time with the whole prompt reused
        llm("say>", temperature=0)
        assert fake_engine.Sampler.created[-1].history == [*byte_tokens("say>ok"), IM_END]


def test_seed_makes_answers_repeatable(path: Path) -> None:
    def answer(llm: Llama, **options: Any) -> str:
        return llm("say>", max_tokens=12, temperature=1.5, **options)["choices"][0]["text"]

    with Llama(path, seed=7) as first, Llama(path, seed=7) as second:
        assert answer(first) == answer(second) == answer(first)
        assert answer(first, seed=8) == answer(second, seed=8) != answer(first)
        first.set_seed(8)
        assert answer(first) == answer(second, seed=8)
    with Llama(path) as unseeded:
        assert len({answer(unseeded) for _ in range(5)}) > 1


# -------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("logits_all", [False, True])
def test_logprobs_of_a_completion(path: Path, logits_all: bool) -> None:
    force("hé")
    with Llama(path, n_ctx=64, logits_all=logits_all) as llm:
        logprobs = llm("say>", temperature=0, logprobs=2)["choices"][0]["logprobs"]
        row = native(llm).model.row(byte_tokens("say>")).astype(np.float64)
    expected = row - np.logaddexp.reduce(row)
    assert logprobs["tokens"] == ["h", "", ""]
    assert logprobs["text_offset"] == [4, 5, 5]
    assert logprobs["token_logprobs"][0] == pytest.approx(expected.max(), abs=1e-9)
    assert list(logprobs["top_logprobs"][0].values())[:2] == pytest.approx(sorted(expected)[:-3:-1], abs=1e-6)
    assert all(value <= 0 for value in logprobs["token_logprobs"])


def test_logprobs_zero_gives_the_chosen_token_only(llm: Llama) -> None:
    force("ok")
    logprobs = llm("say>", temperature=0, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["o"], ["k"]]
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[value] for value in logprobs["token_logprobs"]]
    with contextlib.closing(fake_engine.Model("")) as model:
        row = model.row(byte_tokens("say>")).astype(np.float64)
    assert logprobs["token_logprobs"][0] == pytest.approx(float(row.max() - np.logaddexp.reduce(row)), abs=1e-9)


@pytest.mark.parametrize("stop", [None, "wör"])
def test_streamed_logprobs_are_the_plain_ones(llm: Llama, stop: str | None) -> None:
    force("hello wörld")
    options = {"max_tokens": 30, "stop": stop, "temperature": 0, "logprobs": 1}
    plain = llm("say>", **options)["choices"][0]["logprobs"]
    together: dict[str, list[Any]] = {key: [] for key in plain}
    for chunk in llm("say>", stream=True, **options):
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            together[key] += values
    assert together == plain
    assert "".join(plain["tokens"]) == (
        "hello " if stop else "hello wrld"
    )  # the two tokens of ö have no text of their own


def test_echoed_prompt_is_scored_against_its_own_forward_pass(llm: Llama) -> None:
    force("ok")
    prompt = "the quick brown fox says>"  # two batches of 16
    logprobs = llm(prompt, echo=True, logprobs=1, max_tokens=2, temperature=0)["choices"][0]["logprobs"]
    tokens = llm.tokenize(prompt.encode())
    assert len(tokens) > 16
    assert logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"]) == prompt + "ok"
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    with contextlib.closing(fake_engine.Model("")) as model:
        for position in range(1, len(tokens)):
            row = model.row(tokens[:position]).astype(np.float64)
            expected = row[tokens[position]] - np.logaddexp.reduce(row)
            assert logprobs["token_logprobs"][position] == pytest.approx(expected, abs=1e-9)


# -------------------------------------------------------------------------------- chat

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]


def test_chat_response_has_the_openai_shape(llm: Llama) -> None:
    force("Hello 😀")
    fake_engine.Model.marker = byte_tokens("\n")[0]
    response = llm.create_chat_completion(MESSAGES, temperature=0, model="m")
    assert response["id"].startswith("chatcmpl-")
    assert (response["object"], response["model"]) == ("chat.completion", "m")
    assert response["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello 😀"}, "logprobs": None, "finish_reason": "stop"}
    ]
    prompt = llm.detokenize(llm.eval_tokens, special=True).decode()
    assert prompt.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert response["usage"]["completion_tokens"] == 10
    json.dumps(response)


def test_chat_takes_text_parts(llm: Llama) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    llm.create_chat_completion([{"role": "user", "content": parts}], max_tokens=1)
    assert b"user\none\ntwo<|im_end|>" in llm.detokenize(llm.eval_tokens, special=True)
    with pytest.raises(InvalidArgument, match=r"image_url.*not supported yet"):
        llm.create_chat_completion([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(TypeError, match="content"):
        llm.create_chat_completion([{"role": "user", "content": 5}])


def test_chat_format_replaces_the_template_by_name_or_source(path: Path) -> None:
    with Llama(path, chat_format="{{ messages[0].content }}>") as llm:
        force("ok")
        assert llm.create_chat_completion([{"role": "user", "content": "say"}])["usage"]["prompt_tokens"] == 4
    with Llama(path, chat_format="llama3") as llm:
        llm.create_chat_completion(MESSAGES, max_tokens=1)
        assert b"<|start_header_id|>" in llm.detokenize(llm.eval_tokens)
    with Llama(path, chat_format="no-such") as llm, pytest.raises(TemplateError, match="no-such"):
        llm.create_chat_completion(MESSAGES)


def test_bos_that_the_template_spells_out_is_not_doubled(path: Path) -> None:
    chat_format = "{{ bos_token }}{{ messages[0].content }}"
    with Llama(path, chat_format=chat_format, kv_overrides={"tokenizer.ggml.add_bos_token": True}) as llm:
        llm.create_chat_completion([{"role": "user", "content": "x"}], max_tokens=1)
        assert list(llm.eval_tokens) == [IM_START, *byte_tokens("x")]


def test_chat_stream_has_role_content_and_finish(llm: Llama) -> None:
    force("Hey")
    fake_engine.Model.marker = byte_tokens("\n")[0]
    chunks = list(llm.create_chat_completion(MESSAGES, temperature=0, stream=True, stop="y"))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant"},
        {"content": "H"},
        {"content": "e"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_chat_logprobs(llm: Llama) -> None:
    force("Hi")
    fake_engine.Model.marker = byte_tokens("\n")[0]
    content = llm.create_chat_completion(MESSAGES, temperature=0, logprobs=True, top_logprobs=2)["choices"][0][
        "logprobs"
    ]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("H", [72]), ("i", [105])]
    assert all(len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["logprob"] <= 0 for entry in content)
    with pytest.raises(InvalidArgument, match="top_logprobs requires logprobs"):
        llm.create_chat_completion(MESSAGES, top_logprobs=2)


@pytest.mark.parametrize(
    "option",
    [{"functions": [{}]}, {"function_call": {"name": "f"}}],
)
def test_chat_option_to_come_is_named(llm: Llama, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"{next(iter(option))}.*not supported yet"):
        llm.create_chat_completion(MESSAGES, **option)


def test_chat_accepts_text_format_and_no_tools(llm: Llama) -> None:
    llm.create_chat_completion(MESSAGES, max_tokens=1, response_format={"type": "text"}, tools=[], tool_choice="auto")


@pytest.mark.parametrize("messages", ["hello", None, [1], [None], {"role": "user"}])
def test_messages_of_a_wrong_type_are_a_type_error(llm: Llama, messages: Any) -> None:
    with pytest.raises(TypeError, match="messages"):
        llm.create_chat_completion(messages)


# -------------------------------------------------------------------------------- prefix reuse


def test_next_call_computes_only_what_is_new(llm: Llama) -> None:
    llm(byte_tokens("a" * 40), max_tokens=3, temperature=0)
    engine = native(llm)
    for prompt, new in (("a" * 40, 1), ("a" * 40 + "bc", 2), ("a" * 20, 1), ("a" * 10 + "z", 1), ("q", 1)):
        engine.computed.clear()
        llm(byte_tokens(prompt), max_tokens=1)
        assert sum(engine.computed) == new, prompt
        assert list(llm.eval_tokens) == byte_tokens(prompt)


def test_follow_up_turn_reuses_the_answer(llm: Llama) -> None:
    force("yes")
    llm("say>", temperature=0)
    engine = native(llm)
    engine.computed.clear()
    llm(byte_tokens("say>yes no"), max_tokens=1)
    assert sum(engine.computed) == 3  # the end-of-generation token never entered the memory


def test_reuse_does_not_change_answers(path: Path) -> None:
    prompts = ["abcdef", "abc", "abcdef", "abcxyz", "x", "abcdef"]
    with Llama(path, n_batch=2) as reusing:
        for prompt in prompts:
            with Llama(path) as fresh:
                options = {"max_tokens": 8, "temperature": 0}
                assert reusing(prompt, **options)["choices"] == fresh(prompt, **options)["choices"]


def test_long_prompts_run_in_batches(llm: Llama) -> None:
    llm(byte_tokens("x" * 40), max_tokens=1)
    assert native(llm).computed == [16, 16, 8]


def test_interrupted_step_leaves_a_usable_object(llm: Llama) -> None:
    """The interrupt arrives after the engine took the tokens and before they are written down here."""
    force("fine")
    engine = native(llm)

    def interrupted(work: Any) -> Any:
        fake_engine.Engine.step(engine, work)
        raise KeyboardInterrupt

    engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm("abc>")
    del engine.step
    assert engine.length(0) == 4
    assert llm.n_tokens == 0
    assert llm("abc>", temperature=0)["choices"][0]["text"] == "fine"
    assert list(llm.eval_tokens) == engine.tokens


# -------------------------------------------------------------------------------- low level


def test_eval_and_sample_spell_the_greedy_answer(llm: Llama) -> None:
    force("hello")
    llm.eval(llm.tokenize(b"say>"))
    tokens = []
    for _ in range(5):
        token = llm.sample(temp=0)
        tokens.append(token)
        llm.eval([token])
    assert llm.detokenize(tokens) == b"hello"
    assert llm.sample(temp=0) == llm.token_eos()
    assert list(llm.eval_tokens) == [*byte_tokens("say>hello")]
    assert llm.input_ids.tolist() == byte_tokens("say>hello")


def test_generate_draws_what_the_completion_draws(llm: Llama) -> None:
    llm.set_seed(5)
    tokens = list(itertools.islice(llm.generate(byte_tokens("say>"), temp=0.9), 8))
    assert (
        llm.detokenize(tokens).decode("utf-8", "replace")
        == llm("say>", max_tokens=8, temperature=0.9, seed=5)["choices"][0]["text"]
    )


def test_generate_and_sample_take_a_logit_bias(llm: Llama) -> None:
    prompt = byte_tokens("say>")

    def drawn(**more: Any) -> list[int]:
        return list(itertools.islice(llm.generate(prompt, temp=0, **more), 4))

    first = drawn()[0]
    assert first not in drawn(logit_bias={first: False})
    assert drawn(logit_bias={str(first + 1): 100.0}) == [first + 1] * 4
    text = llm("say>", max_tokens=4, temperature=0, logit_bias={first: False})["choices"][0]["text"]
    assert llm.detokenize(drawn(logit_bias={first: False})).decode("utf-8", "replace") == text
    llm.reset()
    llm.eval(prompt)
    assert llm.sample(temp=0) == first
    assert llm.sample(temp=0, logit_bias={first + 1: 100.0}) == first + 1
    for call in (lambda bias: next(llm.generate(prompt, logit_bias=bias)), lambda bias: llm.sample(logit_bias=bias)):
        with pytest.raises(InvalidArgument, match="is not a token id with a number"):
            call({"x": 1.0})
        with pytest.raises(TypeError, match="logit_bias must be a mapping of token ids to numbers, found list"):
            call([1])


def test_generate_takes_sent_tokens_and_goes_on(llm: Llama) -> None:
    with llm.generate(byte_tokens("ab"), temp=0) as drawn:
        first = next(drawn)
        drawn.send(byte_tokens("XY"))
        assert list(llm.eval_tokens) == [*byte_tokens("ab"), first, *byte_tokens("XY")]
    held = list(llm.eval_tokens)
    with llm.generate([], temp=0, reset=False) as drawn:
        assert next(drawn) == int(native(llm).model.row(held).argmax())
    assert list(llm.eval_tokens) == held


def test_generate_past_the_context_raises_context_full(path: Path) -> None:
    with Llama(path, n_ctx=20) as llm:
        drawn = llm.generate(byte_tokens("x" * 18), temp=0)
        assert len([next(drawn) for _ in range(3)]) == 3
        with pytest.raises(ContextFull, match="holds 20"):
            next(drawn)
        with pytest.raises(ContextFull):
            llm.eval([5])
        assert llm.n_tokens == 20


def test_generate_without_tokens_is_refused(llm: Llama) -> None:
    for reset in (True, False):
        with pytest.raises(InvalidArgument, match="no tokens"):
            next(llm.generate([], reset=reset))
    with pytest.raises(InvalidArgument, match="no tokens"):
        llm.sample()


def test_sample_continues_its_random_numbers(llm: Llama) -> None:
    llm.set_seed(3)
    llm.eval(byte_tokens("ab"))
    drawn = [llm.sample(temp=2.0) for _ in range(20)]
    assert len(set(drawn)) > 1
    llm.set_seed(3)
    assert [llm.sample(temp=2.0) for _ in range(20)] == drawn
    assert fake_engine.Sampler.created[-1].history == byte_tokens("ab")


def test_logits_processor_and_stopping_criteria(llm: Llama) -> None:
    force("hello")
    seen: list[list[int]] = []

    def no_l(input_ids: Any, scores: Any) -> Any:
        seen.append(input_ids.tolist())
        scores[byte_tokens("l")] = -np.inf
        scores[byte_tokens("L")] = 1000
        return scores

    text = llm("say>", max_tokens=3, temperature=0, logits_processor=[no_l])["choices"][0]["text"]
    assert text == "LLL"
    assert seen[1] == byte_tokens("say>L")
    choice = llm("say>", max_tokens=9, temperature=0, stopping_criteria=lambda ids, row: len(ids) == 6)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("he", "stop")
    with pytest.raises(InvalidArgument, match="shape"):
        llm("say>", logits_processor=lambda ids, row: row[:5])


def test_scores_hold_the_last_row_or_all_rows(path: Path) -> None:
    tokens = byte_tokens("abcdefg")
    with Llama(path, n_batch=3) as last, Llama(path, n_batch=3, logits_all=True) as every:
        for llm in (last, every):
            llm.eval(tokens)
            row = native(llm).model.row(tokens)
            assert np.array_equal(llm.scores[len(tokens) - 1], row)
            assert np.array_equal(llm.scores[-1], row)
            assert llm.scores[-1, 5] == row[5]
            assert llm.scores.shape == (7, N_VOCAB)
            with pytest.raises(IndexError):
                llm.scores[7]
        assert last.scores.nbytes == N_VOCAB * 4
        with pytest.raises(InvalidArgument, match="logits_all"):
            last.scores[2]
        assert every.scores.nbytes == 7 * N_VOCAB * 4
        assert np.array_equal(
            np.asarray(every.scores), np.stack([native(every).model.row(tokens[: i + 1]) for i in range(7)])
        )
        assert every.scores[2:4].shape == (2, N_VOCAB)
        assert every.scores[2:4, 1].shape == (2,)
        assert every.sample(temp=0, idx=2) == int(every.scores[2].argmax())
        every.n_tokens = 4
        assert every.scores.shape == (4, N_VOCAB)
        every("abcd", max_tokens=3)
        assert len(np.asarray(every.scores)) == every.n_tokens == 6


def test_assigning_n_tokens_cuts_the_sequence(llm: Llama) -> None:
    llm.eval(byte_tokens("abcdef"))
    llm.n_tokens = 2
    assert list(llm.eval_tokens) == byte_tokens("ab") == native(llm).tokens
    assert llm.sample(temp=0) == int(native(llm).model.row(byte_tokens("ab")).argmax())  # its logits were not kept
    with pytest.raises(InvalidArgument, match="can only be cut"):
        llm.n_tokens = 3
    llm.reset()
    assert llm.n_tokens == native(llm).length(0) == 0


# -------------------------------------------------------------------------------- state


def test_loaded_state_goes_on_identically(path: Path) -> None:
    with Llama(path, seed=11) as saver, Llama(path, seed=12) as loader:
        saver("once upon", max_tokens=5)
        state = pickle.loads(pickle.dumps(saver.save_state()))
        held = list(saver.eval_tokens)
        assert state.n_tokens == len(held)
        assert state.llama_state_size == len(state.llama_state)
        expected = list(itertools.islice(saver.generate([], reset=False), 6))
        loader.eval(byte_tokens("something else"))
        loader.load_state(state)
        assert list(loader.eval_tokens) == held
        assert list(itertools.islice(loader.generate([], reset=False), 6)) == expected
        loader.load_state(state)
        assert loader.sample(temp=0) == int(native(loader).model.row(held).argmax())


def test_damaged_state_is_refused_and_leaves_an_empty_sequence(llm: Llama) -> None:
    llm.eval(byte_tokens("abc"))
    state = llm.save_state()
    cut = type(state)(state.input_ids, state.llama_state[:5], state.seed)
    other = type(state)(state.input_ids[:2], state.llama_state, state.seed)
    for bad in (cut, other):
        with pytest.raises(InvalidArgument):
            llm.load_state(bad)
        assert llm.n_tokens == native(llm).length(0) == 0
    for wrong in (None, b"", state.llama_state):
        with pytest.raises(TypeError, match="LlamaState"):
            llm.load_state(wrong)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------- end of life


def test_closed_object_raises_and_closing_twice_is_fine(path: Path) -> None:
    llm = Llama(path)
    state = llm.save_state()
    llm.close()
    llm.close()
    calls = [
        lambda: llm("x"), lambda: llm("x", stream=True), lambda: llm.eval([1]), llm.sample, llm.reset, llm.save_state,
        lambda: llm.load_state(state), lambda: llm.generate([1]), lambda: llm.create_chat_completion(MESSAGES),
        lambda: setattr(llm, "n_tokens", 0), lambda: llm.set_seed(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidArgument, match="closed"):
            call()
    assert llm.tokenize(b"still")
    assert llm.n_tokens == 0


def test_deleting_the_object_gives_the_memory_back(path: Path) -> None:
    live = fake_engine.Engine.live
    llm = Llama(path)
    llm("x", max_tokens=1)
    next(llm("x", stream=True))
    del llm
    gc.collect()
    assert fake_engine.Engine.live == live


def test_closing_ends_an_open_stream_with_an_error(path: Path) -> None:
    force("hello")
    with Llama(path) as llm:
        stream = llm("say>", stream=True)
        next(stream)
    with pytest.raises(InvalidArgument, match="closed"):
        next(stream)


# -------------------------------------------------------------------------------- one thread, streams


def test_closed_or_dropped_stream_lets_the_next_call_run(llm: Llama) -> None:
    force("hello")
    for _ in llm("say>", stream=True):
        break  # the iterator is dropped here
    stream = llm("say>", stream=True)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    unread = llm("say>", stream=True)
    assert llm("say>", temperature=0)["choices"][0]["text"] == "hello"
    unread.close()


def test_call_inside_an_open_stream_of_the_main_thread_is_an_error_not_a_hang(llm: Llama) -> None:
    force("hello")
    stream = llm("say>", stream=True)
    next(stream)
    with pytest.raises(PyllamaError, match="stream of this Llama object is still open"):
        llm("other>")
    assert streamed_text(stream) == "ello"
    assert llm("say>", temperature=0)["choices"][0]["text"] == "hello"


def test_call_from_a_callback_is_an_error_not_a_hang(llm: Llama) -> None:
    with pytest.raises(PyllamaError, match="callback"):
        llm("say>", logits_processor=lambda ids, row: llm.eval([1]))
    assert llm("say>", max_tokens=1)["choices"]
