"""docs/faults.md: every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_test_that_holds_a_fault_exists() -> None:
    document = (REPOSITORY / "docs/faults.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(test_\w+\w\b)(?!\*)", document))
    files = list((REPOSITORY / "tests").rglob("test_*.py"))
    known = {path.stem for path in files}
    for path in files:
        known |= set(re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(named) > 100
    assert not named - known
