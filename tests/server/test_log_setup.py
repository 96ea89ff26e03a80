"""What the log looks like, as text and as JSON lines, and where it goes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyllama.server.log_setup import configure_logging

log = logging.getLogger("pyllama.server.srv")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("pyllama")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    for handler in set(logger.handlers) - set(before[0]):
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before
    logger.manager._clear_cache()  # of the levels that loggers below have looked up


def say_all(words: str = "words") -> None:
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(log, level)(f"%s of {level}", words)


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_text_goes_to_stderr(capsys: Any) -> None:
    configure_logging(verbosity=4, timestamps=False)
    say_all()
    out, err = capsys.readouterr()
    assert out == ""
    assert [line[0] for line in err.splitlines()] == ["D", "I", "W", "E", "E"]
    assert err.splitlines()[1] == "I srv         say_all: words of info"


def test_json_lines_go_to_stdout_one_per_record(capsys: Any) -> None:
    configure_logging(verbosity=4, as_json=True, colors="on")
    before = time.time_ns() // 1000
    say_all("two\nlines, \x1b \ud800 \u00e9 \u2028")
    out, err = capsys.readouterr()
    assert err == ""
    assert out.isascii()
    lines = json_lines(out)
    assert [line["level"] for line in lines] == ["debug", "info", "warn", "error", "error"]
    for line in lines:
        assert list(line) == ["type", "time", "level", "msg"]
        assert line["type"] == "log"
        assert before - 1000 <= line["time"] <= time.time_ns() // 1000 + 1000
    assert lines[1]["msg"] == "srv         say_all: two\nlines, \x1b \ud800 \u00e9 \u2028 of info"


def test_a_traceback_stays_in_the_line_of_its_record(capsys: Any) -> None:
    configure_logging(as_json=True)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("it failed")
    (line,) = json_lines(capsys.readouterr().out)
    assert line["msg"].startswith("srv  ")
    assert "it failed\nTraceback" in line["msg"]
    assert line["msg"].endswith("ValueError: broken")


def test_the_verbosity_filters_json_lines_too(capsys: Any) -> None:
    configure_logging(verbosity=2, as_json=True)
    say_all()
    assert [line["level"] for line in json_lines(capsys.readouterr().out)] == ["warn", "error", "error"]
    configure_logging(as_json=True, disabled=True)
    say_all()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_file_begins_empty_and_has_the_same_lines(tmp_path: Path, capsys: Any, as_json: bool) -> None:
    path = tmp_path / "log"
    path.write_text("of an earlier run\n")
    configure_logging(path=str(path), as_json=as_json, colors="off")
    log.info("hello")
    out, err = capsys.readouterr()
    assert path.read_text() == (out if as_json else err) != ""
