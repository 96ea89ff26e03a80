"""All CUDA kernels compile for SM70 within the budgets of their headers; what the report reads in the machine code.

Needs no GPU: NVRTC compiles, `scripts/sm70_code.py` reads. NVDISASM names a disassembler of CUDA 12 to compare with.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kernel_report
from compile_kernels import compile_all, find_compiler, read_units, sources_key
from kernel_report import Budget, Row
from sm70_code import Instruction, Kernel, Mix, read_cubin
from support.random_blocks import block_size

HMMA, LOP3, EXIT, BRA = 0x236, 0x812, 0x94D, 0x947
STREAM_16 = Instruction(0x381, 1 << 22 | 6 << 9)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prebuilt = os.environ.get("V100_KERNELS_DIR")
    if prebuilt:
        return Path(prebuilt)
    if find_compiler() is None:
        pytest.skip("needs NVRTC 12 or nvcc 11.8 to 12.9")
    folder = tmp_path_factory.mktemp("kernels")
    for built in Path(__file__).parents[2].glob("build/*/ggml_v100/cuda/kernels"):
        shutil.copytree(built, folder, dirs_exist_ok=True)  # what the build has compiled is not compiled again
    compile_all(folder, jobs=2)
    return folder


@pytest.fixture(scope="module")
def rows(kernels: Path) -> list[Row]:
    return kernel_report.report(kernels)


def test_every_kernel_stays_within_its_budget(rows: list[Row]) -> None:
    assert len(rows) > 100
    assert [fault for row in rows for fault in row.faults()] == []


@pytest.mark.parametrize(("n_rows", "most"), [(8, 1.15), (16, 1.3), (32, 1.65)])
def test_streaming_kernels_are_predicted_to_run_near_the_speed_of_memory(
    rows: list[Row], n_rows: int, most: float
) -> None:
    # With fewer bytes the tensor instructions of 32 rows take longer than the bytes, however the kernel is made.
    large = {unit.name for unit in read_units() if (unit.bytes_of_32 or 0) >= 10.5}
    names = (f"rows{n_rows}", f"gated_rows{n_rows}")
    streaming = [row for row in rows if row.is_streaming and row.kernel.name in names and row.kernel.unit in large]
    assert len(streaming) == 34
    slow = {f"{row.kernel.unit}/{row.kernel.name}": row.slowdown for row in streaming if row.slowdown > most}
    assert slow == {}


def test_prompt_kernels_are_predicted_to_reach_60_tflops_even_if_nothing_overlaps(rows: list[Row]) -> None:
    prompt = [row for row in rows if row.is_prompt and row.kernel.name.endswith("wide")]
    assert len(prompt) == 2 * sum(unit.source.name == kernel_report.PROMPT_SOURCE for unit in read_units())
    slow = {f"{row.kernel.unit}/{row.kernel.name}": row.tera_flops for row in prompt if row.limit != "tensor"}
    assert slow == {}
    goal = [row for row in prompt if row.kernel.unit in ("linear_prompt_q8_0", "linear_prompt_q4_k")]
    assert len(goal) == 4
    assert min(row.least_tera_flops for row in goal) >= 60


def test_the_document_has_the_tables_of_these_kernels(rows: list[Row]) -> None:
    compiler = find_compiler()
    if compiler is None or compiler.identity() != "nvrtc 12.4":
        pytest.skip("the table is of NVRTC 12.4")
    assert kernel_report.DOCUMENT.read_text() == kernel_report.document_with(rows), (
        "run scripts/kernel_report.py --docs"
    )


def test_units_state_the_bytes_of_their_type() -> None:
    for unit in read_units():
        if unit.bytes_of_32 is None:
            continue
        name = unit.defines["CODEC"]
        values, size = block_size(name)
        assert unit.bytes_of_32 == 32 * size / values, name


def test_the_program_prints_a_verdict_and_json(
    kernels: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_report.py", "--kernels", str(kernels), "--check", "--json"])
    assert kernel_report.main() == 0
    *text, verdict = capsys.readouterr().out.splitlines()
    facts = json.loads("\n".join(text))
    assert {"unit", "kernel", "registers", "stack_bytes", "main_loop"} <= facts[0].keys()
    assert re.match(rf"{len(facts)} kernels, 0 over budget; slowest loop linear_\w+/\w+ [\d.]+x of DRAM", verdict)


def test_an_overrun_or_missing_budget_fails_the_check() -> None:
    kernel = Kernel("unit", "name", registers=130, shared_bytes=20_000, stack_bytes=8, code=[])
    budget = Budget(threads=512, registers=128, shared_bytes=16_384, stack_bytes=0)
    assert Row(kernel, budget, kernel_report.blocks_per_sm(kernel, 512), None, {}).faults() == [
        "unit/name: 130 registers, its budget is 128",
        "unit/name: 20000 bytes of shared memory, its budget is 16384",
        "unit/name: 8 bytes of stack, its budget is 0",
        "unit/name: no block of 512 threads fits on an SM",
    ]
    assert Row(kernel, None, None, None, {}).faults() == ["unit/name: no budget line in its source"]


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "blocks"),
    [(64, 0, 512, 2), (65, 0, 512, 1), (32, 0, 1024, 2), (128, 0, 256, 2), (16, 40_000, 128, 2), (16, 0, 32, 32)],
)
def test_blocks_per_sm(registers: int, shared_bytes: int, threads: int, blocks: int) -> None:
    assert kernel_report.blocks_per_sm(Kernel("u", "k", registers, shared_bytes, 0, []), threads) == blocks


def test_a_prompt_kernel_is_as_fast_as_its_busiest_unit() -> None:
    busy = {"L2": 50.0, "tensor": 100.0, "issue": 80.0, "integer": 10.0, "float": 10.0, "L1": 40.0}
    row = Row(Kernel("unit", "wide", 200, 0, 0, []), None, 1, None, busy)
    assert row.is_prompt
    assert not row.is_streaming
    assert row.tera_flops == pytest.approx(125.3, abs=0.1)
    assert row.least_tera_flops == pytest.approx(125.3 * 100 / (100 + 30 + 40), abs=0.1)
    assert row._replace(cycles=busy | {"L2": 200.0}).tera_flops == pytest.approx(62.7, abs=0.1)
    assert row._replace(cycles=busy | {"L2": 200.0}).limit == "L2"


def branch(instructions: int) -> Instruction:
    return Instruction(BRA | (16 * instructions & 0xFFFFFFFF) << 32, 0)


def test_the_main_loop_is_the_one_with_the_tensor_instructions() -> None:
    plain, tensor = Instruction(LOP3, 0), Instruction(HMMA, 0)
    code = [plain, plain, branch(-3), STREAM_16, tensor, tensor, plain, branch(-5), branch(-1), Instruction(EXIT, 0)]
    kernel = Kernel("unit", "rows8", 32, 0, 0, code)
    assert kernel.loops() == [(0, 3), (3, 8)]
    loop = kernel.main_loop()
    assert loop == Mix(instructions=5, tensor=2, integer=1, global_loads=1, stream_bytes=512, l1_cycles=4)
    assert Kernel("unit", "name", 32, 0, 0, [plain, Instruction(EXIT, 0)]).main_loop() is None


def test_the_key_covers_every_kernel_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import compile_kernels

    before = sources_key()
    for path in compile_kernels.KERNELS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compile_kernels, "KERNELS", tmp_path)
    assert sources_key() == before
    (tmp_path / "params.h").write_text("// changed\n")
    assert sources_key() != before


def test_instructions_are_read_as_the_disassembler_reads_them(kernels: Path) -> None:
    program = os.environ.get("NVDISASM")
    if not program:
        pytest.skip("needs NVDISASM, a disassembler of CUDA 12")
    counted = (
        ("tensor", r"HMMA"),
        ("half", r"H(ADD|MUL|FMA)2"),
        ("float", r"(FMUL|FADD|FFMA|IMAD)"),
        ("special", r"(MUFU|F2F|F2I|I2F|FCHK)"),
        ("shared", r"(LDS|STS|SHFL)"),
        ("local", r"(LDL|STL)"),
        ("global_loads", r"LDG"),
        ("stream_bytes", r"LDG\.E\.NA"),
    )
    width = {"128": 512, "64": 256, "U16": 64, "U8": 32}
    for unit in ("rows", "linear_q8_0", "linear_q3_k", "linear_iq4_xs"):
        path = kernels / f"{unit}.cubin"
        text = subprocess.run([program, str(path)], capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)", text, re.MULTILINE)
        mix = Mix.of([instruction for kernel in read_cubin(path) for instruction in kernel.code])
        for name, pattern in counted:
            matching = [line for line in lines if re.match(pattern + r"\b", line)]
            expected = len(matching)
            if name == "stream_bytes":
                expected = sum(next((n for part, n in width.items() if part in line), 128) for line in matching)
            assert getattr(mix, name) == expected, (unit, name)
