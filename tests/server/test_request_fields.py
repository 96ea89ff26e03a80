"""The table of request fields: limits, types and aliases; and every field with every wrong type against the running
application.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pyllama.server.errors import InvalidRequest
from pyllama.server.generation_params import GenerationParams
from pyllama.server.request_fields import (
    REQUEST_FIELDS,
    UNSUPPORTED_FIELDS,
    fields_markdown,
    read_params,
    read_samplers,
)
from pyllama.server.sampling_params import SamplingParams

WRONG_VALUES = [
    None,
    True,
    "text",
    "",
    5,
    -5,
    0.5,
    [],
    [1, "x", None],
    {},
    {"a": {"b": 1}},
    10**30,
    -(10**30),
    10**400,
    1e308,
    -1e308,
]
CHAT_FIELDS = [
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "echo", "logprobs", "top_logprobs", "stream_options", "user",
    "store", "metadata",
]  # fmt: skip
OTHER_FIELDS = ["prompt", "samplers", "logit_bias", "stream_options", "reasoning_format"]


def read(body: dict[str, Any], **defaults: Any) -> GenerationParams:
    return read_params(
        body,
        GenerationParams(**defaults),
        n_slots=4,
        logit_bias=lambda value: (),
        ban_end_tokens=lambda sampling: sampling,
    )


def test_every_row_has_an_attribute_and_every_number_a_default_within_its_limits() -> None:
    known = {f.name for f in fields(GenerationParams)} | {f.name for f in fields(SamplingParams)}
    for field in REQUEST_FIELDS:
        assert field.name in known
        assert field.help
        owner = SamplingParams() if hasattr(SamplingParams(), field.name) else GenerationParams()
        default = getattr(owner, field.name)
        if field.low is not None and field.name != "seed":
            assert default >= field.low
        if field.high is not None:
            assert default <= field.high


def test_hard_limits_refuse_with_the_documented_text() -> None:
    with pytest.raises(
        InvalidRequest, match=r"Field 'repeat_last_n': Value must be between 0 <= value <= 2147483647, but got -1"
    ):
        read({"repeat_last_n": -1})
    with pytest.raises(InvalidRequest, match="Field 'max_tokens'"):
        read({"max_tokens": -2})
    with pytest.raises(InvalidRequest, match="Field 'n': Value must be between 1 <= value <= 4, but got 5"):
        read({"n": 5})
    with pytest.raises(InvalidRequest, match="Field 'n_cmpl': Value must be between 1 <= value <= 4, but got 0"):
        read({"n_cmpl": False})
    with pytest.raises(InvalidRequest, match="'t_max_predict_ms': Value must be between -1 <= value <= 9223372036854"):
        read({"t_max_predict_ms": -2})
    assert read({"t_max_predict_ms": 10**12}).t_max_predict_ms == 10**12
    for breakers in ([], "x", 5, {}, [1], ["a", None]):
        with pytest.raises(InvalidRequest, match="Error: dry_sequence_breakers must be a non-empty array of strings"):
            read({"dry_sequence_breakers": breakers})


def test_soft_limits_clamp() -> None:
    sampling = read(
        {"top_k": -3, "top_p": 7, "min_p": -1, "temperature": -2, "mirostat": -1, "xtc_probability": -4}
    ).sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature, sampling.mirostat) == (0, 1, 0, 0, 0)
    assert read({"temperature": 999999}).sampling.temperature == 999999
    assert read({"top_k": 10**30}).sampling.top_k == 2**31 - 1


def test_null_is_absent_and_the_first_alias_present_wins() -> None:
    assert read({"n_predict": None, "max_completion_tokens": 3, "max_tokens": 4}).n_predict == 3
    assert read({"max_tokens": 4, "n_predict": 2}).n_predict == 2
    assert read({"temperature": None}).sampling.temperature == 0.8


def test_booleans_count_as_numbers_fractions_are_cut_and_seeds_wrap() -> None:
    assert read({"n_predict": True}).n_predict == 1
    assert read({"top_k": 5.9}).sampling.top_k == 5
    assert read({"seed": -1}).sampling.seed == 2**32 - 1
    assert read({"seed": 2**40 + 3}).sampling.seed == 3
    assert read({"logprobs": 4}).n_probs == 4
    assert read({"n_probs": -4}).n_probs == 0


def test_infinite_numbers_are_refused() -> None:
    for name in ("temperature", "repeat_penalty", "n_predict", "typical_p"):
        with pytest.raises(InvalidRequest, match=name):
            read({name: math.inf})


def test_an_empty_stop_list_falls_back_to_the_servers() -> None:
    assert read({"stop": []}, stop=("X",)).stop == ("X",)
    assert read({"stop": "a"}, stop=("X",)).stop == ("a",)
    assert read({"stop": ["a", "b"]}).stop == ("a", "b")
    assert read({"stop": ""}).stop == ("",)


def test_samplers_take_names_aliases_and_letters() -> None:
    assert read_samplers(["top-k", "nucleus", "TEMP", "typ", "nope", "k"]) == ("top_k", "top_p", "temperature", "typ_p")
    assert read_samplers("edkypmxtz") == (
        "penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
    )  # fmt: skip
    assert read({"samplers": "xa"}).sampling.samplers == ("xtc", "adaptive_p")
    assert read({"samplers": "ki"}).sampling.samplers == ("top_k", "infill")


def test_neutral_values_are_accepted() -> None:
    read(
        {
            "mirostat": 0, "mirostat_tau": 3, "dry_multiplier": 0, "dry_base": 0.5, "xtc_probability": 0, "typical_p":
            1, "top_n_sigma": -1,
            "dynatemp_range": 0, "xtc_threshold": 0.2, "n_cache_reuse": 0, "lora": [], "grammar": "",
            "reasoning_budget_tokens": -1,
        }
    )  # fmt: skip
    assert read({"dry_base": 0.5}).sampling.dry_base == 1.75
    read({"typical_p": 0.5, "samplers": ["top_k"]})


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_every_field_with_every_type_gets_an_answer_and_the_server_lives(serve: Any, path: str) -> None:
    """Known fault E28: 200, 400 or 501 (or 500 where llama-server answers so), always JSON, never a dead process."""
    server = serve(n_ctx=256)
    names = [name for field in REQUEST_FIELDS for name in field.names]
    names += [*UNSUPPORTED_FIELDS, *OTHER_FIELDS, *(CHAT_FIELDS if "chat" in path else [])]
    base = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    seen = set()
    for name in dict.fromkeys(names):
        for value in WRONG_VALUES:
            body = {**base, name: value}
            if name in ("n_predict", "max_completion_tokens", "stream"):
                body.pop("max_tokens")
            content = json.dumps(body, default=str)
            response = server.client.post(path, content=content)
            assert response.status_code in (200, 400, 501) or (
                response.status_code == 500 and name in ("reasoning_format", "messages", "tools")
            ), f"{name} = {value!r}: {response.status_code} {response.text}"
            seen.add(response.status_code)
            if response.status_code != 200:
                error = response.json()["error"]
                assert error["code"] == response.status_code
                assert error["message"]
    assert seen >= {200, 400, 501}
    server.wait_idle()
    assert server.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "name", ["temperature", "n_predict", "top_p", "seed", "repeat_penalty", "stop", "stream", "cache_prompt"]
)
def test_a_wrong_type_is_named_with_found_and_expected(serve: Any, name: str) -> None:
    response = serve().post("/completion", {"prompt": "x", name: {"a": 1}})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"Field '{name}': type must be ")
    assert message.endswith("but is object")


@pytest.mark.parametrize(
    "numbers",
    ['"temperature":999999,"top_p":-1,"repeat_penalty":0', '"temperature":1e999', '"repeat_penalty":-1',
    '"top_k":0,"repeat_last_n":0', '"repeat_last_n":0,"repeat_penalty":1.5', '"presence_penalty":-1e999'],
)  # fmt: skip
def test_extreme_sampling_numbers_get_an_answer(serve: Any, numbers: str) -> None:
    """Known faults D11, D13, D14."""
    server = serve()
    response = server.client.post("/completion", content='{"prompt":"x","n_predict":2,' + numbers + "}")
    assert response.status_code in (200, 400)
    if '"repeat_penalty":0' in numbers or '"repeat_penalty":-1' in numbers:
        assert response.json()["error"]["message"].startswith("Failed to initialize samplers: ")
    assert server.get("/health").status_code == 200


def test_the_documented_table_is_the_one_that_is_applied() -> None:
    document = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    table = document.partition("fields_markdown -->\n")[2].partition("<!-- end of fields -->")[0]
    assert table == fields_markdown()
