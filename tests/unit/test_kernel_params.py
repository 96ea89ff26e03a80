"""Lists of launches are compared byte by byte, so no byte of a kernel's parameters may be left to the compiler."""

from __future__ import annotations

import ctypes

import pytest

from support.cuda_device import parameter_structs


@pytest.mark.parametrize("name", parameter_structs())
def test_no_struct_has_padding(name: str) -> None:
    struct, end = parameter_structs()[name], 0
    for field, _ in struct._fields_:  # type: ignore[misc]
        placed = getattr(struct, field)
        assert placed.offset == end, f"{placed.offset - end} bytes before {field}"
        end = placed.offset + placed.size
    assert ctypes.sizeof(struct) == end, f"{ctypes.sizeof(struct) - end} bytes at the end"
