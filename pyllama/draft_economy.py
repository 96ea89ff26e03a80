"""How many drafted tokens are worth verifying: measured times of a step against a running estimate of what stands.

A step of r rows takes t(r) seconds, measured as steps go by. Where a drafted token stands with probability p, a draft
of D tokens gives p + p^2 + ... + p^D tokens more, at the cost of t(r + D) - t(r) and of the drafting. The length with
the most tokens per second is chosen; where that is 0, a single token is tried now and then. What is thought of a
sequence begins with what is known of all of them.

What drafts cost and gave is accounted in steps without drafts. Losses are paid from a credit that grows by a small
share of every step; without credit nothing is drafted. So a drafter that is of no use, or whose gain was misjudged,
costs no more than that share, however many sequences there are. Pure: time is an argument.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

STEP_WEIGHT = 0.2  # of a new measurement
FASTER_WEIGHT = 0.5  # of one that is below what was thought: whatever disturbs a step makes it slower
MOST_GROWTH = 4.0  # of what drafting is thought to take: a draft model may have a whole prompt to catch up with
TEST_DECAY = 0.98  # of what was seen of a sequence, per drafted token that was put to the test
PRIOR_TESTS = 4.0  # how firmly is thought of a sequence what is thought of all
ALL_DECAY = 0.99  # of what was seen of all sequences together
ALL_PRIOR_RATE, ALL_PRIOR_TESTS = 0.6, 6.0  # what is thought of a drafter of which nothing was seen, and how firmly
LEAST_RATE = 0.1  # below it drafts are only tried: what they could give is less than times can be trusted
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # rounds between trials of drafts that do not pay
PLAIN_EVERY = 128  # steps after which one without drafts is measured again
FIRST_PLAIN = 3  # steps without drafts before any with
FIRST_CREDIT, MOST_CREDIT = 4.0, 6.0  # steps
FRESH_CREDIT = 0.25  # is waited for when there was none: better many steps at once without drafts than every second one
AMPLE_CREDIT, AMPLE_PAUSE = 3.0, 48  # so much of it makes no pause longer
CREDIT_SHARE = 0.01  # of a step: what it adds to the credit


class MeasuredTimes:
    """Seconds that something takes by its size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []  # measured, ascending

    def __contains__(self, size: int) -> bool:
        return size in self._seconds

    @property
    def largest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def add(self, size: int, seconds: float) -> None:
        known = self._seconds.get(size)
        if known is None:
            bisect.insort(self._sizes, size)
            known = seconds
        self._seconds[size] = known + (FASTER_WEIGHT if seconds < known else STEP_WEIGHT) * (seconds - known)

    def at(self, size: int) -> float:
        """Between what was measured, and beyond it, by a straight line; 0: nothing was."""
        seconds = self._seconds.get(size)
        if seconds is not None:
            return seconds
        sizes = self._sizes
        if len(sizes) < 2 or size < sizes[0]:
            return self._seconds[sizes[0]] if sizes else 0.0
        above = min(bisect.bisect(sizes, size), len(sizes) - 1)
        first, last = sizes[above - 1], sizes[above]
        slope = (self._seconds[last] - self._seconds[first]) / (last - first)
        # More does not take less time, whatever was measured on a busy machine.
        return self._seconds[first] + max(0.0, slope) * (size - first)


@dataclass(slots=True)
class Acceptance:
    """Of one sequence. rounds: since drafts were last tried while they do not pay."""

    is_known: bool = False
    accepted: float = 0.0
    tests: float = 0.0
    pause: int = FIRST_PAUSE
    rounds: int = 0

    def rate(self, prior: float) -> float:
        """Probability that a drafted token stands, given those before it. prior: thought of it at first."""
        return (self.accepted + prior * PRIOR_TESTS) / (self.tests + PRIOR_TESTS)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        n_tests = n_accepted + (n_accepted < n_drafted)
        keep = TEST_DECAY**n_tests
        self.accepted = self.accepted * keep + n_accepted
        self.tests = self.tests * keep + n_tests
        if n_accepted > 0:  # soon again
            self.pause = min(self.pause, FIRST_PAUSE)


class Drafts(NamedTuple):
    """Of a step. n_tokens, longest: of all together, and of the longest. gain: tokens that are expected to stand."""

    n: int = 0
    n_tokens: int = 0
    longest: int = 0
    gain: float = 0.0

    def plus(self, n: int, length: int, gain: float) -> Drafts:
        """With n more of one length and gain."""
        return Drafts(self.n + n, self.n_tokens + n * length, max(self.longest, length), self.gain + n * gain)


NO_DRAFTS = Drafts()


@dataclass(slots=True)
class DraftEconomy:
    """Shared by the sequences of one engine. pause, rounds: of the sequence that was asked about last.

    Of the step that is planned: n_sequences that generate; those that were asked about, and their drafts; promised: of
    the credit, to those that are only tried; is_accounted: all drafts were chosen here; n_quiet: steps, this one
    included, in which nothing will be drafted as far as can be seen.
    """

    drafts_at_once: bool = False  # a whole draft takes no longer than a token of it
    step_times: MeasuredTimes = field(default_factory=MeasuredTimes)  # by rows
    pass_times: MeasuredTimes = field(default_factory=MeasuredTimes)  # of one token, or all, of so many drafts
    n_since_plain: int = 0
    n_plain: dict[int, int] = field(default_factory=dict)  # steps without drafts, by their rows
    accepted: float = 0.0
    tests: float = 0.0
    pause: int = FIRST_PAUSE
    rounds: int = 0
    credit: float = FIRST_CREDIT
    is_exhausted: bool = False  # waits for fresh credit
    n_together: int | None = None  # sequences of the last step whose drafts may pay; None: all
    n_sequences: int = 1
    asked: list[Acceptance] = field(default_factory=list)
    drafts: Drafts = NO_DRAFTS
    promised: float = 0.0
    is_accounted: bool = True
    n_quiet: int = LONGEST_PAUSE

    @property
    def rate(self) -> float:
        """What is thought of a new sequence."""
        return (self.accepted + ALL_PRIOR_RATE * ALL_PRIOR_TESTS) / (self.tests + ALL_PRIOR_TESTS)

    @property
    def is_believed_in(self) -> bool:
        """Whether drafts for a new sequence may pay. Else a draft model reads no prompts before it is tried."""
        return self.rate >= LEAST_RATE

    @property
    def has_credit(self) -> bool:
        return not self.is_exhausted and self.credit > self.promised

    @property
    def n_without_credit(self) -> int:
        """Steps to come, at least."""
        return 1 + int((FRESH_CREDIT - self.credit) / CREDIT_SHARE) if self.is_exhausted else 0

    # ---- what happened

    def on_step(self, n_rows: int, seconds: float, *, n_drafted: int = 0, n_steps: int = 1) -> None:
        """So many steps that only generated took so long each. n_drafted: of the rows."""
        self.step_times.add(n_rows, seconds)
        self.n_sequences = n_rows - n_drafted
        self.credit += CREDIT_SHARE * n_steps
        self.is_exhausted = self.is_exhausted and self.credit < FRESH_CREDIT
        self.n_since_plain = self.n_since_plain + 1 if n_drafted else 0
        for acceptance in self.asked:
            acceptance.rounds += n_steps - 1
        self.on_cost(max(0.0, self.step_times.at(n_rows) - self.step_times.at(self.n_sequences)))

    def on_draft(self, n_drafts: int, longest: int, seconds: float) -> None:
        """So many drafts, of which the longest has so many tokens, were made together."""
        if n_drafts > 0:
            per_pass = seconds / (1 if self.drafts_at_once else max(longest, 1))
            if known := self.pass_times.at(n_drafts):
                per_pass = min(per_pass, MOST_GROWTH * known)
            self.pass_times.add(n_drafts, per_pass)
        self.on_cost(seconds)

    def on_verified(self, n_drafted: int, n_accepted: int) -> None:
        """So much of a draft stood, of any sequence of the step."""
        n_tests = n_accepted + (n_accepted < n_drafted)
        keep = ALL_DECAY**n_tests
        self.accepted = self.accepted * keep + n_accepted
        self.tests = self.tests * keep + n_tests
        if self.is_accounted:
            self.credit = min(MOST_CREDIT, self.credit + n_accepted / self.n_sequences)

    def on_cost(self, seconds: float) -> None:
        """So long was spent on drafts."""
        plain = self.step_times.at(self.n_sequences)
        if plain > 0 and self.is_accounted:
            self.credit = min(MOST_CREDIT, self.credit - seconds / plain)
            self.is_exhausted = self.is_exhausted or self.credit <= 0

    # ---- what to do

    def wants_plain_step(self, n_sequences: int) -> bool:
        """Whether the next step, in which so many sequences generate, is to be without any draft, to be measured."""
        if self.asked:
            self.n_together = max(1, sum(acceptance.rate(self.rate) >= LEAST_RATE for acceptance in self.asked))
        self.n_sequences, self.asked, self.drafts = n_sequences, [], NO_DRAFTS
        self.promised, self.is_accounted, self.n_quiet = 0.0, True, LONGEST_PAUSE
        wants = self.n_plain.get(n_sequences, 0) < FIRST_PLAIN or self.n_since_plain >= PLAIN_EVERY
        self.n_plain[n_sequences] = self.n_plain.get(n_sequences, 0) + wants
        return wants

    def best_length(self, acceptance: Acceptance, most: int) -> int:
        """Tokens of a draft for one of the step's sequences; 0: it does not pay, or nobody knows yet."""
        if not acceptance.is_known:
            acceptance.is_known = True
            acceptance.pause, acceptance.rounds = self.pause, self.rounds
        length = self._best_length(acceptance, most)
        self.asked.append(acceptance)
        self.pause, self.rounds = acceptance.pause, acceptance.rounds
        return length

    def _seconds(self, drafts: Drafts) -> float:
        """Of a step with these drafts, their making included."""
        plain, longer = self.step_times.at(self.n_sequences), self.step_times.at(self.n_sequences + drafts.n_tokens)
        return max(plain, longer) + self.pass_times.at(drafts.n) * self._n_passes(drafts.longest)

    def _n_passes(self, longest: int) -> int:
        return min(1, longest) if self.drafts_at_once else longest

    def _best_length(self, acceptance: Acceptance, most: int) -> int:
        if self.n_sequences not in self.step_times or not self.has_credit:
            self.n_quiet = min(self.n_quiet, max(1, self.n_without_credit))
            return 0
        # No further than twice what was measured: a step of many rows may take surprisingly long.
        n_measured = self.step_times.largest - self.n_sequences
        most = min(most, max(self.n_sequences, 2 * n_measured) - self.drafts.n_tokens)
        rate = acceptance.rate(self.rate)
        length = self._fastest(rate, most) if rate >= LEAST_RATE else 0
        if length > 0:
            acceptance.pause, acceptance.rounds = FIRST_PAUSE, 0
            self.drafts = self.drafts.plus(1, length, sum(rate**i for i in range(1, length + 1)))
            return length
        acceptance.rounds += 1
        pause = min(acceptance.pause, AMPLE_PAUSE) if self.credit >= AMPLE_CREDIT else acceptance.pause
        if acceptance.rounds < pause or most < 1:
            self.n_quiet = min(self.n_quiet, max(1, pause - acceptance.rounds))
            return 0
        acceptance.rounds, acceptance.pause = 0, min(2 * acceptance.pause, LONGEST_PAUSE)
        tried = self.drafts.plus(1, 1, rate)
        self.promised += (self._seconds(tried) - self._seconds(self.drafts)) / self.step_times.at(self.n_sequences)
        self.drafts = tried
        return 1

    def _fastest(self, rate: float, most: int) -> int:
        """The length with the most tokens per second.

        As if others, of whom so many are to come, drafted likewise: drafts are made together, and time is worth more
        beside sequences whose drafts stand.
        """
        drafts, times = self.drafts, self.step_times
        n_together = self.n_sequences if self.n_together is None else min(self.n_together, self.n_sequences)
        n_alike = max(1, n_together - drafts.n)
        n_rows, plain = self.n_sequences + drafts.n_tokens, times.at(self.n_sequences)
        pass_seconds = self.pass_times.at(drafts.n + n_alike)
        n_tokens, chance = self.n_sequences + drafts.gain, 1.0
        best, best_speed = 0, n_tokens / self._seconds(drafts)
        for length in range(1, most + 1):
            chance *= rate
            n_tokens += n_alike * chance
            n_passes = self._n_passes(max(length, drafts.longest))
            seconds = max(plain, times.at(n_rows + n_alike * length)) + pass_seconds * n_passes
            if n_tokens / seconds > best_speed:
                best, best_speed = length, n_tokens / seconds
            elif n_tokens + n_alike * chance * rate / (1 - rate) < best_speed * seconds:
                break  # nothing longer can be faster
        return best
