#!/usr/bin/env python3
"""Must-hold checks of speculation, more than the test suite has time for. Prints a verdict; exits 1 if any fails.

    python scripts/check_speculation.py [--turns 3] [--patterns 10000]

1. Generated requests (architectures, weights, drafters, slots, reused prefixes, stop strings, grammars): every answer
   is that of a server without speculation, bit for bit (`tests/support/speculation_cases.py`).
2. Patterns of accepted and refused drafts on models with a recurrent state: all that is kept of a sequence equals that
   of one decoded token by token (`tests/support/rollback_stress.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server"), str(ROOT / "scripts")]

from pyllama._engine import Model  # noqa: E402
from support.rollback_stress import stress  # noqa: E402  (needs the paths above)
from support.speculation_cases import Files, Tally, run, settings  # noqa: E402
from support.tiny_hybrid import write_tiny_hybrid  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="requests of each conversation (default: 3)")
    parser.add_argument("--patterns", type=int, default=10_000, help="drafts of the rollback check (default: 10000)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        holds = check_cases(Path(folder), arguments.turns)
        holds &= check_rollback(Path(folder), arguments.patterns)
    print(f"verdict: {'holds' if holds else 'FAILS'} ({time.perf_counter() - started:.0f} s)")
    return 0 if holds else 1


def check_cases(folder: Path, n_turns: int) -> bool:
    total, of_drafter = Tally(), Counter[str]()
    for setting, tally in run(Files(folder), settings(), n_turns):
        print(
            f"{setting}: {tally.n_cases} cases, {tally.n_accepted} of {tally.n_drafted} drafted tokens stood, "
            f"{len(tally.differing)} differ",
            flush=True,
        )
        total.add(tally)
        of_drafter[setting.drafter] += tally.n_accepted
    print(
        f"cases: {total.n_cases}, {total.n_constrained} of them constrained, "
        f"{total.n_prefix_hits} with a reused prefix, "
        f"{total.n_stopped} ended by a stop string; {total.n_accepted} of {total.n_drafted} drafted tokens stood, "
        f"{total.n_drafted_constrained} were drafted for constrained ones; {len(total.differing)} differ"
    )
    for line in total.differing[:20]:
        print(f"differs: {line}")
    silent = [drafter for drafter, n_accepted in of_drafter.items() if not n_accepted]
    if silent:
        print(f"no drafted token of {', '.join(silent)} stood: the cases say nothing about acceptance")
    return not total.differing and not silent


def check_rollback(folder: Path, n_patterns: int) -> bool:
    for architecture in ("qwen35", "qwen35moe"):
        shape = {"n_layer": 5, "attention_interval": 3}
        model = Model(write_tiny_hybrid(folder / f"rollback-{architecture}.gguf", architecture, **shape))
        try:
            n_drafts = stress(model, n_patterns // 2)
        except AssertionError as error:
            print(f"rollback of {architecture}: {error or 'another state'}")
            return False
        finally:
            model.close()
        print(f"rollback of {architecture}: {n_drafts} drafts, states equal")
    return True


if __name__ == "__main__":
    sys.exit(main())
