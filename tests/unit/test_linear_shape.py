"""Tests and timings launch streaming kernels by a copy of the launcher's rule: it is that of `linear_shape.h`."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from support.cuda_device import KERNELS
from support.cuda_linear import THREADS, linear_block_groups, linear_groups, most_linear_groups, unit_bytes
from support.random_blocks import RARE_TYPES, TYPES


def test_the_copy_of_the_rule_is_that_of_the_header(tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs a C++ compiler ({compiler[0]} is not there)")
    claims = [f"kLinearThreads == {THREADS}"]
    for most_rows, gated in itertools.product((8, 16, 32, 64), (False, True)):
        for tiles in (1, 2, 3, 160, 480, 481, 7760):
            groups = linear_groups(most_rows, tiles, gated)
            claims.append(f"linear_groups({most_rows}, {tiles}, {int(gated)}) == {groups}")
    sizes = {unit_bytes(type_name) for type_name in (*TYPES, *RARE_TYPES)} | {63, 64, 65}
    for most_rows, size in itertools.product((8, 16, 32, 64), sorted(sizes)):
        claims.append(f"most_linear_groups({most_rows}, {size}) == {most_linear_groups(most_rows, size)}")
        for groups, has_items, multiprocessors in itertools.product((1, 239, 240, 396), (False, True), (80, 132)):
            expected = linear_block_groups(most_rows, size, groups, has_items, multiprocessors)
            arguments = f"{most_rows}, {size}, {groups}, {int(has_items)}, {multiprocessors}"
            claims.append(f"linear_block_groups({arguments}) == {expected}")
    source = tmp_path / "claims.cpp"
    lines = ['#include "linear_shape.h"', "using namespace v100::cuda;", *(f"static_assert({c});" for c in claims)]
    source.write_text("\n".join(lines) + "\n")
    command = [*compiler, "-std=c++20", "-fsyntax-only", f"-I{KERNELS}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
