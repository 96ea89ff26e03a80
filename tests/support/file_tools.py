"""Runs the file tools in this process, as their installed programs do, and makes small files for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyllama.gguf import GgufWriter, KeyValue, TensorSpec
from pyllama.tools.command_line import run_command


def run_tool(main: Callable[[Sequence[str]], int], *arguments: object) -> int:
    """The exit code. Output goes to sys.stdout and sys.stderr."""
    with pytest.raises(SystemExit) as ended:
        run_command(main, [str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def write_model(path: Path, tensors: Sequence[TensorSpec], keys: Sequence[KeyValue] = (), seed: int = 7) -> Path:
    """A file with random finite data: bytes below 100 make neither infinite halves nor infinite floats."""
    rng = np.random.default_rng(seed)
    with GgufWriter(path, [KeyValue("general.architecture", "string", "llama"), *keys], tensors) as writer:
        for spec in tensors:
            writer.write(rng.integers(0, 100, spec.n_bytes, dtype=np.uint8))
    return path
