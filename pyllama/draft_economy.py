"""How many drafted tokens are worth verifying: measured times of a step against a running estimate of what stands.

A step of r rows takes t(r) seconds, measured as steps go by. Where a drafted token stands with probability p, a draft
of D tokens gives p + p^2 + ... + p^D tokens more, at the cost of t(n + D) - t(n) and of the drafting. The length with
the most tokens per second is chosen; where that is 0, a short draft is tried now and then. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_WEIGHT = 0.2  # of a new measurement
TEST_DECAY = 0.95  # of what was seen of a sequence, per drafted token that was put to the test
PRIOR_RATE, PRIOR_TESTS = 0.6, 3.0  # what is thought of a sequence of which nothing was seen
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # rounds between trials of drafts that do not pay
TRIAL = 2  # tokens
PLAIN_EVERY = 64  # rounds after which a step without drafts is measured again


@dataclass(slots=True)
class Acceptance:
    """Of one sequence. rounds: since drafts were last tried while they do not pay."""

    accepted: float = 0.0
    tests: float = 0.0
    pause: int = FIRST_PAUSE
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Probability that a drafted token stands, given those before it."""
        return (self.accepted + PRIOR_RATE * PRIOR_TESTS) / (self.tests + PRIOR_TESTS)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        n_tests = n_accepted + (n_accepted < n_drafted)
        keep = TEST_DECAY**n_tests
        self.accepted = self.accepted * keep + n_accepted
        self.tests = self.tests * keep + n_tests


@dataclass(slots=True)
class DraftEconomy:
    """Shared by the sequences of one engine."""

    seconds_of_rows: dict[int, float] = field(default_factory=dict)
    seconds_per_draft_token: float = 0.0
    n_rounds: int = 0

    def on_step(self, n_rows: int, seconds: float) -> None:
        """A step that only generated took so long."""
        known = self.seconds_of_rows.get(n_rows)
        self.seconds_of_rows[n_rows] = seconds if known is None else known + STEP_WEIGHT * (seconds - known)

    def on_draft(self, n_tokens: int, seconds: float) -> None:
        """Drafts of so many tokens together, those that are verified, were made."""
        per_token = seconds / max(n_tokens, 1)
        self.seconds_per_draft_token += STEP_WEIGHT * (per_token - self.seconds_per_draft_token)

    def step_seconds(self, n_rows: int) -> float:
        """Estimated: between measurements by a straight line, beyond them as if rows cost nothing until seen."""
        known = self.seconds_of_rows
        if n_rows in known:
            return known[n_rows]
        below = max((rows for rows in known if rows < n_rows), default=None)
        above = min((rows for rows in known if rows > n_rows), default=None)
        if below is None:
            return known[above] if above is not None else 0.0
        if above is None:
            return known[below]
        share = (n_rows - below) / (above - below)
        return known[below] + share * (known[above] - known[below])

    def best_length(self, acceptance: Acceptance, n_rows: int, most: int) -> int:
        """Tokens of a draft for one of `n_rows` sequences that generate; 0: it does not pay."""
        self.n_rounds += 1
        if n_rows not in self.seconds_of_rows or self.n_rounds % PLAIN_EVERY == 0:
            return 0  # what a plain step takes is to be known first
        # No further than twice what was measured: a step of many rows may take surprisingly long.
        most = min(most, 2 * max(self.seconds_of_rows) - n_rows + 1)
        best, best_speed = 0, n_rows / self.step_seconds(n_rows)
        gain, chance = 0.0, 1.0
        for length in range(1, most + 1):
            chance *= acceptance.rate
            gain += chance
            seconds = self.step_seconds(n_rows + length) + length * self.seconds_per_draft_token
            if (n_rows + gain) / seconds > best_speed:
                best, best_speed = length, (n_rows + gain) / seconds
        if best > 0:
            acceptance.pause, acceptance.rounds = FIRST_PAUSE, 0
            return best
        acceptance.rounds += 1
        if acceptance.rounds < acceptance.pause:
            return 0
        acceptance.rounds, acceptance.pause = 0, min(2 * acceptance.pause, LONGEST_PAUSE)
        return min(TRIAL, most)
