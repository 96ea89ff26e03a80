"""Typed look-up of metadata: any integer type that fits, nothing else; overrides win; faults name key and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from security.sanitized_driver import SanitizedDrivers
from unit import gguf_bytes as g

INTEGERS = {
    "u8": (g.U8, 255),
    "i8": (g.I8, -128),
    "u16": (g.U16, 65535),
    "i16": (g.I16, -32768),
    "u32": (g.U32, 2**32 - 1),
    "i32": (g.I32, -(2**31)),
    "u64": (g.U64, 2**63 - 1),
    "i64": (g.I64, -(2**63)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = [g.scalar(name.encode(), value_type, value) for name, (value_type, value) in INTEGERS.items()]
    keys += [
        g.scalar(b"too_large", g.U64, 2**63),
        g.scalar(b"f32", g.F32, 0.5),
        g.scalar(b"f64", g.F64, -2.25),
        g.key_value(b"flag", g.BOOL, b"\x02"),
        g.string_value(b"name", b"text"),
        *(
            g.array_value(f"array.{name}".encode(), value_type, g.pack(value_type, value, 1), 2)
            for name, (value_type, value) in INTEGERS.items()
        ),
        g.array_value(b"array.bool", g.BOOL, b"\x00\x05", 2),
        g.array_value(b"array.f32", g.F32, g.pack(g.F32, 1, 2), 2),
        g.array_value(b"array.string", g.STRING, g.string(b"a") + g.string(b"b"), 2),
        g.array_value(b"array.too_large", g.U64, g.pack(g.U64, 2**63), 1),
        g.array_value(b"array.empty", g.I32, b"", 0),
    ]
    path = tmp_path_factory.mktemp("metadata") / "keys.gguf"
    path.write_bytes(g.gguf_file(keys))
    return path


def look_up(drivers: SanitizedDrivers, path: Path, query: str, *overrides: str) -> str:
    (line,) = drivers.run("metadata_driver", str(path), *overrides, "--", query)
    return line.replace(f"{path}: ", "")


@pytest.mark.parametrize("name", INTEGERS)
def test_every_integer_type_is_an_integer(drivers: SanitizedDrivers, path: Path, name: str) -> None:
    value = INTEGERS[name][1]
    assert look_up(drivers, path, f"int:{name}") == str(value)
    assert look_up(drivers, path, f"ints3:{name}") == f"{value} {value} {value}"
    assert look_up(drivers, path, f"ints2:array.{name}") == f"{value} 1"
    assert look_up(drivers, path, f"ints1:array.{name}") == f"{value}"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("float:f32", "0.500000"),
        ("float:f64", "-2.250000"),
        ("bool:flag", "true"),
        ("string:name", "text"),
        ("ints2:array.bool", "0 1"),
        ("ints0:array.empty", ""),
        ("array_size:array.string", "2"),
        ("array_size:array.empty", "0"),
        ("has:name", "true"),
        ("has:nothing", "false"),
        *((f"{kind}:nothing", "absent") for kind in ("int", "float", "bool", "string", "array_size", "ints4")),
    ],
)
def test_value_is_found(drivers: SanitizedDrivers, path: Path, query: str, expected: str) -> None:
    assert look_up(drivers, path, query) == expected


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("int:too_large", "'too_large' is 9223372036854775808, expected at most 9223372036854775807"),
        ("ints1:array.too_large", "'array.too_large' is 9223372036854775808, expected at most 9223372036854775807"),
        ("int:f32", "'f32' has type f32, expected an integer"),
        ("int:flag", "'flag' has type bool, expected an integer"),
        ("int:name", "'name' has type string, expected an integer"),
        ("int:array.u32", "'array.u32' has type array of 2 u32, expected an integer"),
        ("float:u32", "'u32' has type u32, expected a float"),
        ("bool:u8", "'u8' has type u8, expected a bool"),
        ("string:u8", "'u8' has type u8, expected a string"),
        ("string:array.string", "'array.string' has type array of 2 string, expected a string"),
        ("array_size:u8", "'u8' has type u8, expected an array"),
        ("ints3:array.u32", "'array.u32' has 2 elements, expected 3"),
        ("ints2:array.f32", "'array.f32' has type array of 2 f32, expected integers or bools"),
        ("ints2:array.string", "'array.string' has type array of 2 string, expected integers or bools"),
        ("ints1:name", "'name' has type string, expected an integer or an array of integers"),
        ("require_int:nothing", "'nothing' is missing"),
        ("require_float:nothing", "'nothing' is missing"),
        ("require_string:nothing", "'nothing' is missing"),
    ],
)
def test_fault_names_key_and_numbers(drivers: SanitizedDrivers, path: Path, query: str, fault: str) -> None:
    assert look_up(drivers, path, query) == f"ModelError: metadata key {fault}"


@pytest.mark.parametrize(
    ("override", "query", "expected"),
    [
        ("u8=int:-7", "int:u8", "-7"),
        ("name=int:5", "int:name", "5"),  # the override's type counts, not that of the file
        ("nothing=int:5", "require_int:nothing", "5"),
        ("nothing=int:5", "has:nothing", "true"),
        ("array.u32=int:9", "ints3:array.u32", "9 9 9"),
        ("f32=float:1.5", "float:f32", "1.500000"),
        ("f32=int:10000", "float:f32", "10000.000000"),
        ("flag=bool:false", "bool:flag", "false"),
        ("name=str:other", "string:name", "other"),
        ("u8=str:7", "int:u8", "ModelError: metadata key 'u8': its override is a string, expected an integer"),
        ("u8=float:7", "int:u8", "ModelError: metadata key 'u8': its override is a float, expected an integer"),
        ("f32=bool:true", "float:f32", "ModelError: metadata key 'f32': its override is a bool, expected a float"),
        (
            "array.u32=int:1",
            "array_size:array.u32",
            "ModelError: metadata key 'array.u32': its override is an integer, but arrays cannot be overridden",
        ),
    ],
)
def test_override_replaces_the_value_or_is_refused(
    drivers: SanitizedDrivers, path: Path, override: str, query: str, expected: str
) -> None:
    assert look_up(drivers, path, query, override) == expected
