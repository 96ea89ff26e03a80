"""Grammars and JSON schemas against a byte vocabulary: what they allow, what they refuse, and how they say so."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from pyllama.errors import InvalidArgument
from pyllama.grammar import Constraint, ConstraintFailed, GrammarCompiler, GrammarError, GrammarSource, LlamaGrammar

END = (256, 257)  # both end a generation
N_VOCAB = 260  # the model has rows that the tokenizer does not know


class ByteTokenizer:
    """Tokens 0..255 are bytes; `pair` is one more token with two of them."""

    n_vocab = 259

    def __init__(self, *, ends: bool = True) -> None:
        self.eog_ids = frozenset(END) if ends else frozenset()

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in END:
            return b"<end>" if special else b""
        return b"ab" if token == 258 else bytes([token])

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        return [256] if text == "<end>" and parse_special else list(text.encode())


COMPILER = GrammarCompiler(ByteTokenizer(), N_VOCAB)


def gbnf(text: str, **options: Any) -> Constraint:
    return COMPILER.compile(GrammarSource("gbnf", text), **options)


def schema(value: Any, **options: Any) -> Constraint:
    return COMPILER.compile(GrammarSource("json_schema", json.dumps(value)), **options)


def allowed(constraint: Constraint) -> set[int]:
    mask = constraint.mask()
    return {token for token in range(N_VOCAB) if int(mask[token // 32]) >> (token % 32) & 1}


def accepts(start: Constraint, text: str) -> bool:
    """Whether the whole text may be generated, byte by byte, and may end there."""
    constraint = start.copy()
    for byte in text.encode():
        if byte not in allowed(constraint):
            return False
        constraint.accept(byte)
    return set(END) <= allowed(constraint)


def generate(start: Constraint, rng: random.Random, most: int = 400) -> str:
    """A text drawn evenly from what is allowed at each step."""
    constraint, out = start.copy(), b""
    for _ in range(most):
        token = rng.choice(sorted(allowed(constraint)))
        constraint.accept(token)
        if token in END:
            return out.decode()
        out += COMPILER._tokenizer.piece(token)
    raise AssertionError(f"no end after {most} tokens: {out[-80:]!r}")


# ---- GBNF


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "text"', ["text"], ["", "tex", "texts"]),
        ('root ::= [a-z]* "x"', ["x", "abx", "xxx"], ["", "ab"]),
        ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "bcd"]),
        ('root ::= ("a" "b"?){2,3} # comment', ["aa", "abaab"], ["a", "aaaa", "b"]),
        ('root ::= "a"{5}', ["aaaaa"], ["aaaa", "aaaaaa"]),
        ('root ::= "a"{2,}', ["aa", "aaaaa"], ["a"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab"]),
        ('root ::= "ab"+?', ["", "ab", "abab"], ["aba"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(", "())"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["ab"]),
        ('root ::=\n  a-1 |\n  A2\na-1 ::= "1"\r\nA2 ::= (\n "2"\n)\n', ["1", "2"], ["12"]),
        ('x ::= "1"\nroot ::= x\nx ::= "2"', ["2"], ["1"]),
        (r'root ::= [^a-c\]] "\x41\u00e9\U0001F600\"\\"', ['zAé😀"\\', '日Aé😀"\\'], ['aAé😀"\\', ']Aé😀"\\']),
        ("root ::= [a-] .", ["-\n", "a😀"], ["b", "a"]),
        ('root ::= [^] "a"', ["\na"], ["a"]),
        ("root ::= <[65]> <[66]>?", ["A", "AB"], ["B"]),
    ],
)
def test_a_grammar_allows_its_texts_and_no_others(grammar: str, good: list[str], bad: list[str]) -> None:
    constraint = gbnf(grammar)
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


def test_random_grammars_allow_what_the_equal_regular_expression_matches() -> None:
    rng = random.Random(7)

    def make(depth: int) -> tuple[str, str]:
        """A piece of GBNF and the same as a regular expression."""
        kind = rng.randrange(6 if depth else 2)
        if kind == 0:
            text = "".join(rng.choices("abc", k=rng.randint(1, 3)))
            return f'"{text}"', text
        if kind == 1:
            return rng.choice((("[ab]", "[ab]"), ("[^a]", "[^a]"), ("[b-c]", "[b-c]")))
        parts = [make(depth - 1) for _ in range(rng.randint(2, 3))]
        if kind in (2, 3):
            return f"({' | '.join(p[0] for p in parts)})", f"(?:{'|'.join(p[1] for p in parts)})"
        if kind == 4:
            return f"({' '.join(p[0] for p in parts)})", f"(?:{''.join(p[1] for p in parts)})"
        mark = rng.choice(("*", "+", "?", "{2}", "{1,2}", "{1,}"))
        return f"({parts[0][0]}){mark}", f"(?:{parts[0][1]}){mark}"

    n_matching = 0
    for _ in range(60):
        grammar, pattern = make(3)
        constraint = gbnf(f"root ::= {grammar}")
        recursive = gbnf(f'root ::= {grammar} | "(" root ")"')  # is followed in another way
        for _ in range(12):
            text = "".join(rng.choices("abcd", k=rng.randint(0, 5)))
            matches = re.fullmatch(pattern, text) is not None
            n_matching += matches
            assert accepts(constraint, text) == matches, (grammar, text)
            assert accepts(recursive, text) == matches, (grammar, text)
            nested = any(re.fullmatch(pattern, inner) for inner in (f"(({text}))", f"({text})", text))
            assert accepts(recursive, f"(({text}))") == nested, (grammar, text)
    assert n_matching > 50


def test_tokens_of_several_characters_are_allowed_where_all_of_them_fit() -> None:
    assert allowed(gbnf('root ::= "ab"')) == {ord("a"), 258}
    assert allowed(gbnf('root ::= "a"')) == {ord("a")}
    assert allowed(gbnf("root ::= .")) >= {ord("a")}
    assert 258 not in allowed(gbnf("root ::= ."))


def test_tokens_without_text_are_never_allowed_and_all_end_tokens_together() -> None:
    assert allowed(gbnf("root ::= .*")) & {256, 257, 259} == {256, 257}
    assert allowed(gbnf('root ::= "a"?', banned=(257,))) == {ord("a"), 256}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('rout::="x"', "no rule 'root'"),
        (':== "kek"', "line 1, column 1: expected a rule name"),
        ('root ::= "x"\nfoo = "y"', "line 2, column 5: expected '::='"),
        ("root ::= x", "line 1, column 10: there is no rule 'x'"),
        ('root ::= ("a"', "line 1, column 10: this parenthesis is not closed"),
        ('root ::= "a', "line 1, column 10: this text has no closing"),
        ("root ::= [a", "line 1, column 10: this character class is not closed"),
        ("root ::= []", "character class is empty"),
        ("root ::= [z-a]", "runs backwards"),
        ('root ::= "\\q"', "line 1, column 11: unknown escape"),
        ('root ::= "\\x4"', "needs 2 hexadecimal digits"),
        ('root ::= "\\U00110000"', "not a character"),
        ("root ::= *", "nothing before it to repeat"),
        ('root ::= "a"{,3}', "expected a number"),
        ('root ::= "a"{3,2}', "at least 3 repetitions"),
        ('root ::= "a"{2001}', "2001 repetitions are demanded"),
        ('root ::= ("a"{50}){50}', "multiply to 2500"),
        ('root ::= "a" )', "expected the end of the rule"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested deeper"),
        ("root ::= <unknown>", "is not one token"),
        ("root ::= !<[65]>", "not supported yet"),
        ('root ::= root "a"', "no text can match"),
        ("", "no rule 'root'"),
    ],
)
def test_a_faulty_grammar_is_refused_with_its_place(grammar: str, message: str) -> None:
    """Known fault D10."""
    with pytest.raises(GrammarError, match=re.escape(message)):
        gbnf(grammar)


@pytest.mark.parametrize("n", [1999, 2000])
def test_repetitions_up_to_the_limit_are_exact(n: int) -> None:
    constraint = gbnf(f'root ::= "a"{{{n}}}').copy()
    for _ in range(n):
        assert allowed(constraint) <= {ord("a"), 258}
        constraint.accept(ord("a"))
    assert allowed(constraint) == set(END)


class WordTokenizer(ByteTokenizer):
    """Bytes and 40 000 words, some of them twice."""

    n_vocab = 40_256
    words = tuple(f"{a}{b}{c}".encode() for a in "abcdefghij" for b in range(100) for c in range(40))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else self.words[token - 256]


def test_a_recursive_grammar_is_followed_on_a_large_vocabulary() -> None:
    compiler = GrammarCompiler(WordTokenizer(ends=False), WordTokenizer.n_vocab)
    constraint = compiler.compile(GrammarSource("gbnf", 'root ::= "[" (root | [a-z] [^"]*)? "]"'))
    for byte in b"[[a":
        constraint.accept(byte)
    mask = constraint.mask()
    n_allowed = sum(int(word).bit_count() for word in mask)
    # All words, ASCII but the quotation mark, and the bytes that begin longer characters.
    assert n_allowed == 40_000 + 127 + (0xF5 - 0xC2)


def test_an_end_before_its_time_and_a_token_that_is_not_allowed_are_errors() -> None:
    with pytest.raises(ConstraintFailed, match="before the grammar was complete"):
        gbnf('root ::= "a"').accept(END[0])
    with pytest.raises(ConstraintFailed):
        gbnf('root ::= "a"').accept(ord("b"))


def test_banned_tokens_leave_an_error_and_not_a_free_text() -> None:
    with pytest.raises(ConstraintFailed, match="banned"):
        gbnf('root ::= "a"', banned=(ord("a"),)).mask()


@pytest.mark.parametrize("bans", [True, False])
def test_without_end_tokens_a_complete_text_must_end(bans: bool) -> None:
    compiler = GrammarCompiler(ByteTokenizer(ends=bans), N_VOCAB)
    constraint = compiler.compile(GrammarSource("gbnf", 'root ::= "ab"'), END)
    assert not constraint.must_end
    constraint.accept(ord("a"))
    assert not constraint.must_end
    constraint.accept(ord("b"))
    assert constraint.must_end


def test_copies_go_their_own_ways() -> None:
    first = gbnf('root ::= "ab" | "ac"')
    first.accept(ord("a"))
    second = first.copy()
    first.accept(ord("b"))
    assert allowed(first) == set(END)
    assert allowed(second) == {ord("b"), ord("c")}


# ---- JSON schemas


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({}, ["{}", '{"a": [1, "x", null, true, -1.5e3]}'], ["[]", "1", " {}", "{} "]),
        ({"const": "42"}, ['"42"'], ['"43"', "42"]),
        ({"enum": ["r", 1, None]}, ['"r"', "1", "null"], ['"g"']),
        ({"type": "integer", "minimum": 0, "maximum": 23}, ["0", "9", "10", "23"], ["24", "00", "-1"]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
            ['{"a":1}', '{ "a": 1, "b": "x" }', '{\n  "a": 1\n}'],
            ['{"b":"x","a":1}', "{}", '{"a":1,"c":2}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
            ['{"c":2}', '{"a":null,"c":2}'],
            ['{"c":"x"}'],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
            ['[1, "a"]'],
            ["[1]", '[1,"a",2]'],
        ),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]"], ["[]", "[1]"]),
        # D4, D5: classes in patterns are honoured
        ({"type": "string", "pattern": r"^\d{3}-[\w-]+$"}, ['"123-a_-"'], ['"12-a"', '"123-"', '"abc-a"']),
        ({"type": "string", "pattern": r"^hello\!$"}, ['"hello!"'], ['"hello"', '"hello\\!"']),
        # D6, D7, D15: references
        ({"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}]}, ['"x"'], ["1"]),
        (
            {"$defs": {"c": {"enum": ["r", "g"]}}, "type": "object", "properties": {"p": {"$ref": "#/$defs/c"}}},
            ["{}", '{"p":"r"}'],
            ['{"p":{}}', '{"p":"b"}'],
        ),
        (
            {
                "$defs": {
                    "tree": {"type": "object", "properties": {"kids": {"$ref": "#/$defs/list"}}},
                    "list": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "$ref": "#/$defs/tree",
            },
            ['{"kids":[{},{"kids":[]}]}'],
            ['{"kids":[1]}', '{"x":1}'],
        ),
        (
            {
                "allOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"required": ["b"]}],
                "type": "object",
            },
            ['{"a":null,"b":1}'],
            ['{"a":null}', '{"b":1}'],
        ),
        ({"type": "string", "format": "date", "title": "t", "default": 5}, ['"2024-02-29"'], ['"2024-2-29"']),
        ({"type": "string", "format": "made-up", "x-note": 1}, ['"any"'], ["5"]),
    ],
)
def test_a_schema_allows_its_values_and_no_others(value: Any, good: list[str], bad: list[str]) -> None:
    constraint = schema(value)
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Schemas whose every value is short."""
    kind = rng.randrange(7 if depth else 4)
    if kind == 0:
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == 1:
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}
    if kind == 2:
        return {"enum": rng.sample(["a", 'quo"te', 1, 2.5, None, True, "ü"], rng.randint(1, 3))}
    if kind == 3:
        return {"type": rng.choice(["boolean", "null"])}
    if kind == 4:
        least = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": least, "maxItems": least + 2}
    if kind == 5:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    names = rng.sample(["a", "b", "long name", 'q"', "é"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }


def conforms(value: Any, rule: dict[str, Any]) -> bool:
    """What `random_schema` can say, checked by hand."""
    if "anyOf" in rule:
        return any(conforms(value, choice) for choice in rule["anyOf"])
    if "enum" in rule:
        return any(type(value) is type(choice) and value == choice for choice in rule["enum"])
    kind = rule["type"]
    if kind == "integer":
        return type(value) is int and rule["minimum"] <= value <= rule["maximum"]
    if kind == "string":
        return isinstance(value, str) and rule["minLength"] <= len(value) <= rule["maxLength"]
    if kind == "array":
        return (
            isinstance(value, list)
            and rule["minItems"] <= len(value) <= rule["maxItems"]
            and all(conforms(item, rule["items"]) for item in value)
        )
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(rule["required"]) <= value.keys() <= rule["properties"].keys()
            and all(conforms(item, rule["properties"][name]) for name, item in value.items())
        )
    return value is None if kind == "null" else isinstance(value, bool)


def test_whatever_is_drawn_under_a_schema_parses_and_conforms() -> None:
    rng = random.Random(11)
    for _ in range(40):
        rule = random_schema(rng, 2)
        constraint = schema(rule)
        for _ in range(3):
            text = generate(constraint, rng, most=2000)
            assert conforms(json.loads(text), rule), (rule, text)


@pytest.mark.parametrize("n", [1999, 2000, 2001, 100_000])
def test_long_strings_are_allowed(n: int) -> None:
    """Known fault D3."""
    constraint = schema({"type": "object", "properties": {"s": {"type": "string", "maxLength": n}}})
    assert accepts(constraint, '{"s": "' + "x" * 300 + '"}')


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"type": "object", "not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "sound"}, "sound"),
        ({"type": 123}, "type"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "(a"}, "(a"),
        ({"anyOf": []}, "anyOf"),
        ({"enum": []}, "nsatisfiable"),
        ({"type": "object", "properties": 5}, "properties"),
        ({"$ref": "http://127.0.0.1:1/x"}, "http://127.0.0.1:1/x"),
        ({"$ref": "#/$defs/none"}, "none"),
        (5, "must be an object"),
        ([], "must be an object"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "nsatisfiable"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_by_name(value: Any, message: str) -> None:
    """Known fault D5: never an answer that keeps to less than was asked for."""
    with pytest.raises(GrammarError, match=f"(?s)^JSON schema conversion failed:.*{re.escape(message)}"):
        schema(value)


def test_nesting_without_end_is_refused() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    with pytest.raises(GrammarError, match="nested deeper"):
        schema(deep)
    with pytest.raises(GrammarError, match="not valid JSON"):
        COMPILER.compile(GrammarSource("json_schema", "{"))


# ---- the Python API's object


def test_llama_grammar_checks_what_it_can_at_once() -> None:
    assert LlamaGrammar.from_string('root ::= "a"').source == GrammarSource("gbnf", 'root ::= "a"')
    assert LlamaGrammar.from_json_schema({"type": "null"}).source.kind == "json_schema"
    assert LlamaGrammar.from_json_schema('{"type": "null"}').source.text == '{"type": "null"}'
    for wrong in ('rout ::= "a"', "root"):
        with pytest.raises(InvalidArgument):
            LlamaGrammar.from_string(wrong)
    with pytest.raises(InvalidArgument, match="must be an object"):
        LlamaGrammar.from_json_schema("[]")
