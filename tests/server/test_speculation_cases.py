"""Generated requests have the same answers with drafts of every kind as without, bit for bit.

`scripts/check_speculation.py --turns` tries more of them.
"""

from __future__ import annotations

import pytest

pytest.importorskip("pyllama._engine", reason="needs the native module")

from pyllama.server import constrained_draws
from support.speculation_cases import ARCHITECTURES, Files, Setting, Tally, run, settings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("cases"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted under a grammar shall not depend on how busy the machine is."""
    monkeypatch.setattr(constrained_draws, "DRAFT_SECONDS", 5.0)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_are_those_of_a_server_without_speculation(files: Files, architecture: str, slots: int) -> None:
    total = Tally()
    for _, tally in run(files, [s for s in settings() if (s.architecture, s.slots) == (architecture, slots)]):
        total.add(tally)
    assert total.differing == []
    assert total.n_cases >= 60
    assert total.n_drafted > total.n_accepted > 0
    assert total.n_prefix_hits > 0
    assert total.n_drafted_constrained > 0


def test_the_cases_notice_drafts_that_change_texts(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling draws other random numbers."""
    original = Files.arguments
    monkeypatch.setattr(Files, "arguments", lambda files, setting: (*original(files, setting)[:-1], "probabilistic"))
    ((_, tally),) = run(files, [Setting("llama", "q8_0", "foreign", 4)])
    assert tally.differing
