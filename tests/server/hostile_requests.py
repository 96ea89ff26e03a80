"""Requests that nobody sends in good faith, as bytes: for every endpoint and every field, and for the layers below."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyllama.server.endpoints import ENDPOINTS, Endpoint


class HostileRequest(NamedTuple):
    """`why`: shown when the answer is wrong."""

    method: str
    path: str
    content: bytes
    why: str


class Raw(str):
    """JSON text that is put into a body as it stands."""


DEEP = Raw("[" * 50_000 + "]" * 50_000)
DEEP_OBJECT = Raw('{"a":' * 900 + "1" + "}" * 900)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, Raw("1" * 5000), 0.5, -0.0, 1e308, -1e308, 5e-324,
    Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), "", " ", "\0", "x" * 100_000,
    Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'), "\u202e\ufeff\U0001f600", "%s%n{0}{{}}", "../../etc/passwd", "<|im_end|>",
    "</s>" * 50, "{% for x in y %}", [], [[]], [None], [0] * 5000, [-1], [2**40], ["a", 1, None, {}], [[["a"]]], {}, {"": ""},
    {"a": {"b": [1, {"c": None}]}}, {"type": 1}, {"type": "\0"}, [{"role": 1}], [{"role": "user", "content": [1]}],
    [{"role": "tool", "content": {}}], [{"type": "function", "function": {"name": "\0" * 100}}], DEEP, DEEP_OBJECT,
)  # fmt: skip

GRAMMARS: tuple[str, ...] = (
    "root", "root ::=", "::= x", 'root ::= "a', "root ::= root", "root ::= root root | ", "root ::= a\na ::= b\nb ::= a",
    'root ::= "a"{1000000000}', 'root ::= ("a"{1000}){1000}', "root ::= [", "root ::= [z-a]+", "root ::= [^\\x00-\\U0010ffff]",
    "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "root ::= " + "(" * 20_000, "root ::= missing", 'root ::= "\\x"',
    'root ::= "\\U99999999"', "\0", "\U0001f600 ::= x", "# only a comment", 'root ::= "a" root "b" |' + " " * 1000,
    "root ::= " + " | ".join(f'"{i:06d}"' for i in range(3000)), 'root ::= ""*', "root ::= (.*)* (.*)* (.*)*",
    "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0',
)  # fmt: skip


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"}, {"type": "nonsense"}, {"type": []}, {"type": 5},
    {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "pattern": "(" * 500}, {"type": "string", "pattern": "a{99999}{99999}"},
    {"type": "string", "minLength": 2**31}, {"type": "string", "minLength": -1}, {"type": "string", "maxLength": "x"},
    {"type": "array", "minItems": 10**9}, {"type": "array", "items": {"$ref": "#"}, "minItems": 3}, {"enum": []},
    {"enum": [1e308, None, {"a": []}]}, {"const": "\ud800"}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"not": {}},
    {"anyOf": []}, {"oneOf": [{}, {}]}, {"properties": {"a": 1}}, {"required": "a"}, {"multipleOf": 0}, {"minimum": 5, "maximum": 1},
    _nested(60), _nested(400), {"properties": {f"k{i}": {"type": "integer"} for i in range(2000)}}, {"\0": "\0"},
)  # fmt: skip

BODIES: tuple[bytes, ...] = (
    b"", b" ", b"\0", b"{", b"}", b"[", b"null", b"true", b"1", b'"x"', b"[]", b"{}", b"{'a': 1}", b'{"a": 1,}', b"\xff\xfe",
    b'{"prompt": "\xc3\x28"}', b'{"prompt": "\xed\xa0\x80"}', b'\xef\xbb\xbf{"prompt": "a"}', b'{"prompt": "a"} x', b'{"a":1}' * 2,
    b'{"prompt": "a", "prompt": 1}', b"--boundary\r\n", b"a=b&c=d", b"<xml/>", b"[" * 200_000, b'{"a":' * 200_000,
    b'{"prompt": "' + b"a" * 2_000_000, b'{"n_predict": ' + b"9" * 100_000 + b"}", b"/*x*/ {}",
)  # fmt: skip

PATHS: tuple[str, ...] = (
    "/%00", "/..%2f..%2fetc/passwd", "/v1/../props", "//completion", "/completion/", "/slots/0?action=save%00", "/slots/-1?action=",
    "/slots/99999999999999999999?action=erase", "/slots/%F0%9F%98%80?action=erase", "/slots/0?action=restore", "/v1/models/" + "x" * 5000,
    "/metrics?" + "a=b&" * 2000, "/lora-adapters?id=NaN", "/props?autoload=true&model=%00",
)  # fmt: skip

REQUIRED: dict[str, Any] = {
    "prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a", "content": "a", "query": "a",
    "documents": ["a"], "tokens": [5], "input_prefix": "a", "input_suffix": "b", "model": "x",
}  # fmt: skip


def encode(body: dict[str, Any]) -> bytes:
    """As JSON, also what JSON has no way to say."""
    members = (
        f"{json.dumps(name)}: {value if isinstance(value, Raw) else json.dumps(value)}" for name, value in body.items()
    )
    return ("{" + ", ".join(members) + "}").encode("utf-8", "surrogatepass")


def hostile_requests(count: int, seed: int) -> list[HostileRequest]:
    """So many, in random order: all of the fixed ones, and fields with values at random."""
    rng = random.Random(seed)
    requests = [*_bodies(), *_large(), *_constraints(), *(HostileRequest("POST", path, b"{}", path) for path in PATHS)]
    fields = [
        (endpoint, field.name)
        for endpoint in ENDPOINTS
        for field in endpoint.fields
        if not endpoint.router and not endpoint.absent
    ]
    while len(requests) < count:
        endpoint, name = rng.choice(fields)
        requests.append(_with_field(endpoint, name, rng.choice(VALUES), rng))
    rng.shuffle(requests)
    return requests


def _with_field(endpoint: Endpoint, name: str, value: Any, rng: random.Random) -> HostileRequest:
    body = {field.name: REQUIRED.get(field.name, "a") for field in endpoint.fields if field.required}
    if rng.random() < 0.3:
        body["stream"] = True
    body[name] = value
    path = rng.choice(endpoint.paths).replace("{id_slot}", "0") + (
        "?action=save" if "slots" in endpoint.paths[0] else ""
    )
    return HostileRequest("POST", path, encode(body), f"{path} {name} = {str(value)[:60]}")


def _large() -> Iterator[HostileRequest]:
    """Many small things in one request."""
    many: dict[str, Any] = {
        "prompt": ["a"] * 20_000, "logit_bias": [[5, 1.0]] * 50_000, "samplers": ["top_k"] * 20_000, "stop": ["x"] * 5000,
        "response_fields": ["a/b"] * 20_000, "dry_sequence_breakers": ["q" * 1000] * 65,
    }  # fmt: skip
    for name, value in many.items():
        yield HostileRequest(
            "POST", "/completion", encode({"prompt": "a", "n_predict": 2, name: value}), f"many {name}"
        )
    yield HostileRequest("POST", "/detokenize", encode({"tokens": [5] * 100_000}), "many tokens")
    yield HostileRequest("POST", "/v1/embeddings", encode({"input": ["a"] * 200}), "many inputs")


def _bodies() -> Iterator[HostileRequest]:
    for body in BODIES:
        for path in ("/completion", "/v1/chat/completions", "/tokenize", "/lora-adapters"):
            yield HostileRequest("POST", path, body, f"{path} {body[:40]!r}")


def _constraints() -> Iterator[HostileRequest]:
    chat = {"messages": REQUIRED["messages"], "max_tokens": 4}
    for grammar in GRAMMARS:
        yield HostileRequest(
            "POST",
            "/completion",
            encode({"prompt": "a", "n_predict": 4, "grammar": grammar}),
            f"grammar {grammar[:60]}",
        )
    for schema in SCHEMAS:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        why = f"schema {str(schema)[:60]}"
        yield HostileRequest("POST", "/completion", encode({"prompt": "a", "n_predict": 4, "json_schema": schema}), why)
        yield HostileRequest("POST", "/v1/chat/completions", encode({**chat, "response_format": form}), why)
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[0]}}
    for kwargs in (
        {"messages": 1},
        {"tools": "x"},
        {"bos_token": []},
        {"a" * 10_000: "b" * 10_000},
        {"loop": {"a": 1}},
    ):
        yield HostileRequest(
            "POST", "/apply-template", encode({**chat, "chat_template_kwargs": kwargs}), f"kwargs {kwargs}"
        )
        yield HostileRequest("POST", "/v1/chat/completions", encode({**chat, "chat_template_kwargs": kwargs, "tools": [tool]}), f"kwargs {kwargs}")  # fmt: skip


HEADS: tuple[bytes, ...] = (
    b"GET\r\n\r\n", b"\r\n\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"get /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100,
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n{}\r\n",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: a\r\nno colon here\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n: empty\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\r\n folded\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nX: \0\x01\xff\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(5000)) + b"\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"y" * 3_000_000 + b"\r\n\r\n", b"GET /" + b"a" * 3_000_000 + b" HTTP/1.1\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: other\r\n\r\n", b"CONNECT evil.example:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"TRACE /health HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\nOrigin: \xff\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: a\r\nOrigin: null\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 200,
)  # fmt: skip
"""What is sent on a connection of its own, which the client then only reads."""
