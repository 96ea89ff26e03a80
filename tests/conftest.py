"""Fixtures for what is slow or large: real models, cached outside the repository, and a tiny random-weight model.

Helpers live in `tests/support` and are imported as `support.<module>`.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

TESTS_DIR = Path(__file__).resolve().parent
for entry in (TESTS_DIR, TESTS_DIR.parent / "scripts"):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))

import fetch_demo_model  # noqa: E402  (needs the path set above)

from support import model_cache  # noqa: E402
from support.tiny_hybrid import write_tiny_hybrid  # noqa: E402
from support.tiny_llama import write_tiny_llama  # noqa: E402

# A test run in the background (`nohup`, `&` of a script) ignores Ctrl-C and so would the programs it starts, but tests
# send them SIGINT: with a handler here they start with the default action.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (98 MB, read-only). Skips when it cannot be had, unless REQUIRE_TEST_MODELS=1."""
    return model_cache.cached_or_skip(fetch_demo_model.SMOLLM2_Q4_1)


@pytest.fixture(scope="session")
def smollm2_q8_0_path(smollm2_path: Path) -> Path:
    """SmolLM2-135M-Instruct with every matrix in Q8_0 (145 MB), made from the Q4_1 file."""
    return model_cache.cached_as("q8_0", smollm2_path)


@pytest.fixture(scope="session")
def smollm2_f16_path(smollm2_path: Path) -> Path:
    """SmolLM2-135M-Instruct with the values of the Q4_1 file stored as F16 (269 MB)."""
    return model_cache.cached_as("f16", smollm2_path)


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight F32 llama (2 layers, width 64, 300 tokens, chat template), as `write_tiny_llama` makes it."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama-f32.gguf"
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def tiny_hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight F32 qwen35 (8 layers of which 2 attend, width 64), as `write_tiny_hybrid` makes it."""
    path = tmp_path_factory.mktemp("models") / "tiny-qwen35-f32.gguf"
    write_tiny_hybrid(path)
    return path
