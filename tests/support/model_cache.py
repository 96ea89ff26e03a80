"""Real models for tests: fetched once under a file lock, verified, kept outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import fetch_demo_model
from filelock import FileLock

from support.requantize import requantize


def models_are_required() -> bool:
    """`REQUIRE_TEST_MODELS=1`: a missing model is a failure, not a skip."""
    return os.environ.get("REQUIRE_TEST_MODELS", "") not in ("", "0")


def cached_smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1. Raises fetch_demo_model.FetchError when it is not cached and cannot be fetched."""
    cache_dir = fetch_demo_model.default_cache_dir()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / "smollm2-q4_1.lock"):
        return fetch_demo_model.fetch(fetch_demo_model.SMOLLM2_Q4_1, cache_dir)


def cached_smollm2_as(type_name: str, source: Path) -> Path:
    """The same model with every matrix as `type_name` (``f16``, ``q8_0``), made from the Q4_1 file at `source`."""
    cache_dir = fetch_demo_model.default_cache_dir()
    cache_dir.mkdir(parents=True, exist_ok=True)
    target = cache_dir / f"SmolLM2-135M-Instruct.{type_name.upper()}.gguf"
    stamp = target.with_name(target.name + ".ok")  # holds the size: the file is complete
    with FileLock(cache_dir / f"smollm2-{type_name}.lock"):
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
