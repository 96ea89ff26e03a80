"""Every row of `contract_rows.toml` has a test that carries it as a marker, or a reason why not.

The markers are read from the sources of the tests, so that one run of this file speaks for the whole suite.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

TESTS = Path(__file__).resolve().parent.parent
TABLE = tomllib.loads((TESTS / "server" / "contract_rows.toml").read_text(encoding="utf-8"))
UNFINISHED = set(TABLE.pop("unfinished", []))
ROWS = {f"{file} {number}": row for file, rows in TABLE.items() for number, row in rows.items()}
SKIPPED = {name for name, row in ROWS.items() if isinstance(row, dict)}


def marked_rows(source: str) -> Iterator[tuple[str, str]]:
    """`(row, test)` of every contract marker in the source of a test file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.name.startswith("test_"):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.contract":
                for argument in decorator.args:
                    yield ast.literal_eval(argument), node.name


def all_marked_rows() -> dict[str, list[str]]:
    """The tests that carry each row, of the whole suite."""
    tests: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.contract" not in source:
            continue
        found = list(marked_rows(source))
        assert found or path == Path(__file__), f"{path.name}: markers that stand on no test"
        for row, test in found:
            tests.setdefault(row, []).append(f"{path.name}::{test}")
    return tests


def test_markers_are_found_on_tests_only() -> None:
    source = """
@pytest.mark.contract("chat 1", "chat 2")
@pytest.mark.parametrize("x", [1])
def test_a(x): ...
@pytest.mark.contract("chat 3")
def helper(): ...
@pytest.mark.slow
def test_b(): ...
"""
    assert list(marked_rows(source)) == [("chat 1", "test_a"), ("chat 2", "test_a")]


def test_every_skipped_row_says_why() -> None:
    for name in SKIPPED:
        assert set(ROWS[name]) == {"row", "skipped"}, name
        assert all(isinstance(text, str) and text for text in ROWS[name].values()), name
    assert all(row for row in ROWS.values())
    assert UNFINISHED.issubset(TABLE)


def test_markers_name_rows_that_exist_and_are_not_skipped() -> None:
    marked = all_marked_rows()
    assert {row: tests for row, tests in marked.items() if row not in ROWS} == {}
    assert {row: tests for row, tests in marked.items() if row in SKIPPED} == {}


def test_every_row_is_covered_or_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    marked = all_marked_rows()
    bare = [name for name in ROWS if name not in marked and name not in SKIPPED]
    covered = len(ROWS) - len(bare) - len(SKIPPED)
    with capsys.disabled():
        print(f"\ncontract rows: {covered} covered, {len(SKIPPED)} skipped, {len(bare)} without a test: {bare}")
    assert [name for name in bare if name.split()[0] not in UNFINISHED] == []
