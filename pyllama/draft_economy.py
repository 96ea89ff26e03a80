"""How many drafted tokens are worth verifying: measured times of a step against a running estimate of what stands.

A step of r rows takes t(r) seconds, measured as steps go by. Where a drafted token stands with probability p, a draft
of D tokens gives p + p^2 + ... + p^D tokens more, at the cost of t(n + D) - t(n) and of the drafting. The length with
the most tokens per second is chosen; where that is 0, a short draft is tried now and then. A new sequence is thought to
be like those before it: short requests would else each find out anew that drafts do not pay. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_WEIGHT = 0.2  # of a new measurement
FASTER_WEIGHT = 0.5  # of one that is below what was thought: whatever disturbs a step makes it slower
TEST_DECAY = 0.95  # of what was seen of a sequence, per drafted token that was put to the test
PRIOR_RATE, PRIOR_TESTS = 0.6, 3.0  # what is thought of a sequence of which nothing was seen, and how firmly
ALL_DECAY, ALL_PRIOR_TESTS = 0.99, 10.0  # the same of all sequences together
LEAST_RATE = 0.1  # below it drafts are only tried: what they could give is less than times can be trusted
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # rounds between trials of drafts that do not pay
TRIAL = 2  # tokens
PLAIN_EVERY = 64  # steps after which one without drafts is measured again
FIRST_PLAIN = 3  # steps without drafts before any with


@dataclass(slots=True)
class Acceptance:
    """Of one sequence. rounds: since drafts were last tried while they do not pay. prior: thought of it at first."""

    prior: float = PRIOR_RATE
    is_known: bool = False
    accepted: float = 0.0
    tests: float = 0.0
    pause: int = FIRST_PAUSE
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Probability that a drafted token stands, given those before it."""
        return (self.accepted + self.prior * PRIOR_TESTS) / (self.tests + PRIOR_TESTS)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        n_tests = n_accepted + (n_accepted < n_drafted)
        keep = TEST_DECAY**n_tests
        self.accepted = self.accepted * keep + n_accepted
        self.tests = self.tests * keep + n_tests


@dataclass(slots=True)
class DraftEconomy:
    """Shared by the sequences of one engine. pause, rounds: of the sequence that was asked about last."""

    seconds_of_rows: dict[int, float] = field(default_factory=dict)
    seconds_per_draft_token: float = 0.0
    n_steps: int = 0
    n_plain: dict[int, int] = field(default_factory=dict)  # steps without drafts, by their rows
    accepted: float = 0.0
    tests: float = 0.0
    pause: int = FIRST_PAUSE
    rounds: int = 0

    def on_verified(self, n_drafted: int, n_accepted: int) -> None:
        """So much of a draft stood, of any sequence."""
        n_tests = n_accepted + (n_accepted < n_drafted)
        keep = ALL_DECAY**n_tests
        self.accepted = self.accepted * keep + n_accepted
        self.tests = self.tests * keep + n_tests

    @property
    def rate(self) -> float:
        """What is thought of a new sequence."""
        return (self.accepted + PRIOR_RATE * ALL_PRIOR_TESTS) / (self.tests + ALL_PRIOR_TESTS)

    def on_step(self, n_rows: int, seconds: float) -> None:
        """A step that only generated took so long."""
        known = self.seconds_of_rows.get(n_rows, seconds)
        weight = FASTER_WEIGHT if seconds < known else STEP_WEIGHT
        self.seconds_of_rows[n_rows] = known + weight * (seconds - known)

    def wants_plain_step(self, n_rows: int) -> bool:
        """Whether the next step, of `n_rows` sequences that generate, is to be without any draft, to be measured."""
        self.n_steps += 1
        wants = self.n_plain.get(n_rows, 0) < FIRST_PLAIN or self.n_steps % PLAIN_EVERY == 0
        self.n_plain[n_rows] = self.n_plain.get(n_rows, 0) + wants
        return wants

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
        """Tokens of a draft for one of `n_rows` sequences that generate; 0: it does not pay, or nobody knows yet."""
        if not acceptance.is_known:
            acceptance.is_known, acceptance.prior = True, self.rate
            acceptance.pause, acceptance.rounds = self.pause, self.rounds
        length = self._best_length(acceptance, n_rows, most)
        self.pause, self.rounds = acceptance.pause, acceptance.rounds
        return length

    def _best_length(self, acceptance: Acceptance, n_rows: int, most: int) -> int:
        if n_rows not in self.seconds_of_rows:
            return 0
        # No further than twice what was measured: a step of many rows may take surprisingly long.
        most = min(most, 2 * max(self.seconds_of_rows) - n_rows + 1)
        plain = self.step_seconds(n_rows)
        best, best_speed = 0, n_rows / plain
        gain, chance = 0.0, 1.0
        for length in range(1, most + 1 if acceptance.rate >= LEAST_RATE else 1):
            chance *= acceptance.rate
            gain += chance
            # More rows do not take less time, whatever was measured on a busy machine.
            seconds = max(plain, self.step_seconds(n_rows + length)) + length * self.seconds_per_draft_token
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
