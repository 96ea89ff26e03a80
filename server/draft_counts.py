"""How the drafts of one request fared."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyllama.draft_economy import Acceptance


@dataclass(slots=True)
class DraftCounts:
    """Of one request: rounds that verified a draft, its tokens, those that stood, and rounds whose i-th token stood."""

    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        self.acceptance.add(n_drafted, n_accepted)
        self.n_rounds += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.accepted_at += [0] * (n_drafted - len(self.accepted_at))
        for place in range(n_accepted):
            self.accepted_at[place] += 1

    def timings(self) -> dict[str, int]:
        """What `timings` says; nothing for a request without drafts."""
        return {"draft_n": self.n_drafted, "draft_n_accepted": self.n_accepted} if self.n_drafted else {}
