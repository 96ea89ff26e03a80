"""Runs `convert-hf-to-gguf` as its installed program does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyllama.tools import convert_hf_to_gguf
from support.file_tools import run_tool


def run(*arguments: str | Path) -> int:
    """The exit code."""
    return run_tool(convert_hf_to_gguf.main, *arguments)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a failing run prints."""
    capsys.readouterr()
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def left_over(folder: Path) -> list[str]:
    """Names of GGUF files and unfinished files in a folder."""
    return [path.name for path in folder.iterdir() if path.suffix in (".gguf", ".partial")]
