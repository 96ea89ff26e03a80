"""Grammars and schemas that are made to cost time, memory or the stack: a 400 in bounded time, while others are served.

The process-killers are chains: native code recurses along them, so each would end this test run.
"""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support_app import FakeServer

from pyllama.grammar import GrammarError, constraint, deep_thread
from pyllama.grammar.deep_thread import call_deep


def chain(n_rules: int, link: str, tail: str = "") -> str:
    """root -> r1 -> r2 ... ; `link` holds the next rule at %s."""
    rules = [f"r{i} ::= {link % f'r{i + 1}'} {tail if i == 0 else ''}" for i in range(n_rules)]
    return "\n".join(rules).replace("r0 ::=", "root ::=") + f'\nr{n_rules} ::= "a"'


def references(n: int, kind: str) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        next_one = {"$ref": f"#/$defs/d{i + 1}"}
        return {
            "array": {"type": "array", "items": next_one},
            "object": {"type": "object", "properties": {"a": next_one}},
            "plain": next_one,
            "allOf": {"allOf": [next_one, {"title": "x"}]},
        }[kind]

    return {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": link(i) for i in range(n)}, f"d{n}": {"type": "integer"}}}


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


PRIMES = (1_000_003, 1_000_033, 1_000_037)

REFUSED: dict[str, Any] = {
    "parentheses 10,000 deep": {"grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000},
    "2^30 repetitions": {"grammar": 'root ::= "a"{1073741824}'},
    "nested repetitions": {"grammar": 'root ::= (("a"{1000}){1000}){1000}'},
    "10,000 rules in a chain": {"grammar": chain(10_000, "%s")},
    "10 MB of grammar": {"grammar": 'root ::= "' + "a" * 10_000_000 + '"'},
    "many ambiguous alternatives": {"grammar": "root ::= root root" + "".join(f' | "{i}"' for i in range(4000))},
    "schema 10,000 deep": nested(10_000),
    "schema 200 deep": nested(200),
    "10,000 references in a chain": {"json_schema": references(10_000, "array")},
    "too large a product": {"json_schema": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(20)]}},
    "multiples of primes": {"json_schema": {"type": "integer", "allOf": [{"multipleOf": p} for p in PRIMES]}},
    "30,000 properties": {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(30_000)}}},
    "10 MB of enum": {"json_schema": {"enum": [f"{i:050}" for i in range(180_000)]}},
    "long pattern": {"json_schema": {"type": "string", "pattern": "a|" * 100_000}},
    "a reference to itself": {"json_schema": {"allOf": [{"$ref": "#"}]}},
    "a number of 4000 digits": {"json_schema": {"type": "integer", "minimum": 10**3999}},
}  # fmt: skip
SERVED: dict[str, Any] = {
    "2000 rules in a chain": {"grammar": chain(1990, '"(" %s', "| root")},
    "references through objects": {"json_schema": references(900, "object")},
    "references through arrays": {"json_schema": references(900, "array")},
    "references to references": {"json_schema": references(1900, "plain")},
    "references through allOf": {"json_schema": references(600, "allOf")},
    "2^30 repetitions at most": {"grammar": 'root ::= "a"{0,1073741824}'},
    "2^40 texts by doubling": {"grammar": chain(40, "(%s | %s)".replace("%s)", '"b")'))},
    "many items": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 1 << 30}},
    "2^60 items by doubling": {
        "json_schema": {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(60)},
                "d60": {"type": "integer"},
            },
        }
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    server = FakeServer(engine={"step_seconds": 0.001})
    server.post("/completion", {"prompt": "x", "n_predict": 1, "grammar": 'root ::= "a"'})
    yield server
    server.close()


def send(server: FakeServer, fields: Any) -> Any:
    if isinstance(fields, str):  # json.dumps would not write it
        content = f'{{"prompt": "x", "n_predict": 3, "json_schema": {fields}}}'
        return server.client.post("/completion", content=content)
    return server.post("/completion", {"prompt": "x", "n_predict": 3, **fields})


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
def test_a_hostile_grammar_is_answered_while_others_are_served(server: FakeServer, name: str) -> None:
    fields = (REFUSED | SERVED)[name]
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(send, server, fields)
        n_served = 0
        while not answer.done() or n_served == 0:
            assert server.post("/completion", {"prompt": "y", "n_predict": 5}).status_code == 200
            n_served += 1
    assert answer.result().status_code == (200 if name in SERVED else 400), answer.result().text[:300]
    if name in REFUSED:
        assert len(answer.result().text) < 5_000
    assert time.monotonic() - started < 3 * constraint.MAX_SECONDS


def test_what_takes_too_long_is_given_up_and_only_so_much_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_thread, "_places", threading.BoundedSemaphore(2))
    goes_on = threading.Event()
    for _ in range(3):  # the third does not even begin
        with pytest.raises(TimeoutError):
            call_deep(lambda: goes_on.wait(20), 0.05)
    running = [thread for thread in threading.enumerate() if thread.name == "grammar"]
    assert len(running) == 2
    goes_on.set()
    for thread in running:
        thread.join(5)
    assert call_deep(lambda: 5, 5) == 5
    with pytest.raises(ZeroDivisionError):
        call_deep(lambda: 1 // 0, 5)


def test_a_grammar_that_is_not_ready_in_time_is_refused(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*_: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(constraint, "call_deep", gives_up)
    answer = server.post("/completion", {"prompt": "x", "grammar": 'root ::= "not seen yet"'})
    assert answer.status_code == 400
    assert "too complex" in answer.json()["error"]["message"]
    compiler = server.vocabulary.grammars
    with pytest.raises(GrammarError, match="within 20 seconds"):
        compiler.compile(constraint.GrammarSource("json_schema", json.dumps({"const": "not seen yet"})))
