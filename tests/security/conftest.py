"""Fixture: the sanitizer drivers, built once per test run."""

from __future__ import annotations

import os

import pytest
from security.sanitized_driver import SanitizedDrivers, SanitizersUnavailable, build_drivers


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> SanitizedDrivers:
    """Skips where the compiler has no sanitizers, unless REQUIRE_TEST_MODELS=1 (set in continuous integration)."""
    try:
        return build_drivers(tmp_path_factory.mktemp("sanitized"))
    except SanitizersUnavailable as reason:
        if os.environ.get("REQUIRE_TEST_MODELS", "") not in ("", "0"):
            pytest.fail(f"REQUIRE_TEST_MODELS is set, but: {reason}", pytrace=False)
        pytest.skip(f"needs a C++ compiler with sanitizers: {reason}")
