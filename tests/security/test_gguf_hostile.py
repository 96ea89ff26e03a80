"""The GGUF reader and the block decoders under AddressSanitizer and UndefinedBehaviorSanitizer, fed malformed input.

Compared: the outcome (accepted, or the fault named) with that of the rules in `malformed_gguf`. The same files go
through the Python API in tests/unit/test_gguf.py, where values that were read are checked too.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from security.malformed_gguf import ACCEPTED, REJECTED, RULES, SPLITS, Case, SplitCase, small_valid_file
from security.sanitized_driver import SanitizedDrivers
from unit import gguf_bytes as g

SEED = 20261001
N_MUTATIONS = 2000


def record(content: bytes, *, metadata_only: bool = False) -> bytes:
    return struct.pack("<BQ", metadata_only, len(content)) + content


def outcomes(drivers: SanitizedDrivers, scratch: Path, files: Iterable[bytes]) -> list[str]:
    return drivers.run(
        "gguf_driver", "stream", str(scratch / "scratch.gguf"), stdin=b"".join(record(content) for content in files)
    )


def wrong_outcomes(cases: Iterable[Case | SplitCase], lines: Iterable[str]) -> list[str]:
    """One description per case whose outcome is not the one it states."""
    wrong = []
    for case, line in zip(cases, lines, strict=True):
        as_stated = (
            line.startswith("OK") if case.fault is None else line.startswith("GgufError: ") and case.fault in line
        )
        if not as_stated:
            wrong.append(f"{case.id}: expected {case.fault or 'OK'!r}, found {line!r}")
    return wrong


def test_every_rule_of_the_container_has_a_case() -> None:
    cases = {case.rule for case in (*REJECTED, *ACCEPTED, *SPLITS)}
    assert cases == RULES.keys()


@pytest.mark.parametrize("cases", [REJECTED, ACCEPTED], ids=["rejected", "accepted"])
def test_every_rule_of_the_container_has_its_stated_outcome(
    drivers: SanitizedDrivers, tmp_path: Path, cases: tuple[Case, ...]
) -> None:
    stream = b"".join(record(case.content, metadata_only=case.metadata_only) for case in cases)
    lines = drivers.run("gguf_driver", "stream", str(tmp_path / "scratch.gguf"), stdin=stream)
    assert wrong_outcomes(cases, lines) == []


def test_every_rule_of_split_files_has_its_stated_outcome(drivers: SanitizedDrivers, tmp_path: Path) -> None:
    opened = []
    for number, case in enumerate(SPLITS):
        directory = tmp_path / str(number)
        directory.mkdir()
        for name, content in case.files.items():
            (directory / name).write_bytes(content)
        opened.append(str(directory / case.opened))
    lines = drivers.run("gguf_driver", "open", *opened)
    assert wrong_outcomes(SPLITS, lines[:-1]) == []


def test_paths_that_are_no_regular_files_are_refused(drivers: SanitizedDrivers, tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    lines = drivers.run("gguf_driver", "open", str(tmp_path), str(missing), "/dev/null", "")
    assert lines[0] == f"GgufError: {tmp_path}: is a directory, expected a file"
    assert lines[1].startswith(f"GgufError: {missing}: cannot open: ")
    assert lines[2] == "GgufError: /dev/null: is not a regular file"
    assert lines[3].startswith("GgufError: ")


def test_every_truncation_of_a_valid_file_is_refused(drivers: SanitizedDrivers, tmp_path: Path) -> None:
    content = small_valid_file()
    lines = outcomes(drivers, tmp_path, [content[:length] for length in range(len(content) + 1)])
    accepted = [length for length, line in enumerate(lines) if not line.startswith("GgufError: ")]
    assert accepted == [len(content)]


def mutate(rng: random.Random, content: bytes) -> bytes:
    """One to four changes: bit flips, fields overwritten with border values, bytes removed, repeated or inserted."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice([4, 8])
            border = rng.choice([0, 1, 2**7, 2**15, 2**16, 2**30, 2**31, 2**32, 2**61, 2**63, 2**64]) + rng.choice(
                [-1, 0, 1]
            )
            changed[at : at + size] = (border % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 3:
            del changed[at : at + rng.randint(1, 16)]
        else:
            start = rng.randrange(len(changed))
            changed[at:at] = changed[start : start + rng.randint(1, 32)]
        if not changed:
            return b""
    return bytes(changed)


def test_random_mutations_are_read_or_refused_without_a_fault(drivers: SanitizedDrivers, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    valid = small_valid_file()
    lines = outcomes(drivers, tmp_path, [mutate(rng, valid) for _ in range(N_MUTATIONS)])
    accepted = sum(line.startswith("OK") for line in lines)
    assert len(lines) == N_MUTATIONS
    assert all(line.startswith(("OK", "GgufError: ")) for line in lines)
    # Otherwise the mutations are too tame or too wild to test anything.
    assert 100 < accepted < N_MUTATIONS - 500, f"seed {SEED}: {accepted} of {N_MUTATIONS} accepted"
    assert len({re.sub(r"\d+", "#", line) for line in lines}) > 50


@pytest.mark.parametrize(
    "case", [c for c in REJECTED if c.rule in ("A1", "A4", "A6", "A7", "G05", "G08")], ids=lambda c: c.id
)
def test_claimed_sizes_do_not_grow_the_process(drivers: SanitizedDrivers, tmp_path: Path, case: Case) -> None:
    path = tmp_path / "claims.gguf"
    path.write_bytes(case.content)
    lines = drivers.run("gguf_driver", "open", str(path))
    assert lines[0].startswith("GgufError: ")
    growth = re.fullmatch(r"peak growth: (\d+) KiB", lines[1])
    assert growth is not None, lines[1]
    assert int(growth.group(1)) < 50 * 1024


def test_tensors_with_scales_that_are_not_finite_are_found(drivers: SanitizedDrivers, tmp_path: Path) -> None:
    half_inf, half_one = b"\x00\x7c", b"\x00\x3c"
    tensors = [
        g.tensor_info(b"good", [32], g.TYPE_Q4_0, offset=0),
        g.tensor_info(b"infinite", [64], g.TYPE_Q4_0, offset=32),
        g.tensor_info(b"not_a_number", [2], g.TYPE_F32, offset=96),
    ]
    good_block, bad_block = half_one + bytes(16), half_inf + bytes(16)
    data = g.pad(good_block) + g.pad(good_block + bad_block) + struct.pack("<2f", 1.0, float("nan"))
    (line,) = outcomes(drivers, tmp_path, [g.gguf_file((), tensors, data)])
    assert line.endswith(", not finite: infinite not_a_number")


def test_any_bytes_decode_as_every_type(drivers: SanitizedDrivers) -> None:
    lines = drivers.run("gguf_driver", "blocks", str(SEED), "60")
    assert len(lines) == 35
    assert all(line.startswith("OK ") for line in lines)
