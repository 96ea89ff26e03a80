"""Lines about slots are the ones that scripts look for in llama-server's log."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from pyllama.server import slot_log

RATES = r" +\d+\.\d\d ms / +{n} tokens \( *\d+\.\d\d ms per token, +\d+\.\d\d tokens per second\)"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """`lines()`: what was logged about slots since the last call."""
    caplog.set_level(logging.DEBUG, "pyllama.server.slot")

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "pyllama.server.slot"]
        caplog.clear()
        return [line for line in found if "prefix reuse" not in line]

    return take


def test_a_request_is_told_from_its_slot_to_its_timings(serve: Any, lines: Any) -> None:
    server = serve(n_slots=2)
    server.post("/completion", {"prompt": "abcdefgh", "n_predict": 5, "id_slot": 1})
    server.wait_idle()
    expected = [
        r"id  1 \| task -1 \| selected slot by id \(1\)",
        r"id  1 \| task 0 \| processing task, is_child = 0",
        r"id  1 \| task 0 \| prompt eval time =" + RATES.format(n=8),
        r"id  1 \| task 0 \|        eval time =" + RATES.format(n=5),
        r"id  1 \| task 0 \|       total time = +\d+\.\d\d ms / +13 tokens",
        r"id  1 \| task 0 \| stop processing: n_tokens = 12, truncated = 0",
        r"all slots are idle",
    ]
    found = lines()
    assert len(found) == len(expected)
    for pattern, line in zip(expected, found, strict=True):
        assert re.fullmatch(pattern, line), line
    server.post("/completion", {"prompt": "abcdefgh", "n_predict": 1})
    assert "id  1 | task -1 | selected slot by LCP similarity, f_sim_best = 1.000" in lines()
    server.post("/completion", {"prompt": "12345678", "n_predict": 1})
    assert re.fullmatch(r"id  0 \| task -1 \| selected slot by LRU, t_last = -?\d+", lines()[0])


def test_choices_are_told_as_children(serve: Any, lines: Any) -> None:
    serve(n_slots=2).post("/completion", {"prompt": "a", "n_predict": 1, "n": 2})
    launched = [line.partition("| ")[2] for line in lines() if "is_child" in line]
    assert launched == ["task 0 | processing task, is_child = 0", "task 1 | processing task, is_child = 1"]


def test_only_a_long_prompt_reports_its_progress(lines: Any) -> None:
    generation = SimpleNamespace(slot_id=2, age=7, t_start=1.0, t_prompt_end=3.9, n_prompt=4000, n_cached=1000)
    slot_log.prompt_progress(generation, 2000)
    assert lines() == []
    generation.t_prompt_end = 5.0
    slot_log.prompt_progress(generation, 3000)
    assert lines() == [
        "id  2 | task 7 | prompt processing, n_tokens =   3000, progress = 0.75, t =   4.00 s / 500.00 tokens per "
        "second"
    ]


def test_a_long_generation_reports_its_speed_every_three_seconds(lines: Any) -> None:
    reports = slot_log.GenerationReports(1)

    def generate(task: int, tokens_per_second: float, n: int) -> list[str]:
        generation = SimpleNamespace(slot_id=0, age=task, t_prompt_end=10.0)
        for count in range(1, n + 1):
            generation.n_decoded = count
            reports.on_token(generation, 10.0 + (count - 1) / tokens_per_second)
        return lines()

    assert generate(1, 20, 99) == []
    assert generate(2, 20, 260) == [
        "id  0 | task 2 | n_gen =    100, tg =  20.00 t/s, tg_3s =  20.00 t/s",
        "id  0 | task 2 | n_gen =    160, tg =  20.00 t/s, tg_3s =  20.00 t/s",
        "id  0 | task 2 | n_gen =    220, tg =  20.00 t/s, tg_3s =  20.00 t/s",
    ]
    assert generate(3, 1000, 3000) == []
