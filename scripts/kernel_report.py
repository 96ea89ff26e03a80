"""What the CUDA kernels need and how long their main loops take on a V100, from the SM70 machine code alone.

    kernel_report.py [--kernels DIR] [--check] [--json] [--docs]

Without --kernels they are compiled first. Lists registers, stack, shared memory and occupancy of every kernel; --check
compares them with the budgets in the kernels' headers and ends with 1 when one is overrun or missing; --docs writes the
tables of docs/kernels.md. The last line is the verdict.

Prediction: a warp's round of the main loop needs cycles of its sub-partition for tensor instructions, issue slots,
arithmetic pipes, and of the SM's L1 and shared memory; where weights stream (linear.cu) also for bytes from DRAM (its
share of the measured read ceiling), where they are used for many rows (linear_prompt.cu) for bytes from L2. The largest
is the limit. A streaming kernel's time is the bytes' time times (limit / DRAM), a prompt kernel's rate that of the
tensor cores times (tensor / limit). Latency is not part of it; for prompt kernels a second rate is given, which they
reach if tensor instructions, other issue slots and shared memory do not overlap at all.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from sm70_code import Kernel, Mix, read_cubin

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "ggml_v100/cuda/kernels"
DOCUMENT = ROOT / "docs/kernels.md"
sys.path.insert(0, str(KERNELS.parent))

import compile_kernels  # noqa: E402  (needs the path set above)

# The V100: spec of the SXM2 board and measured ceilings.
SMS = 80
CLOCK_HZ = 1.53e9
DRAM_BYTES_PER_SECOND = 879e9  # read-only stream
L2_BYTES_PER_SECOND = 2155e9  # loads, a published measurement at 1.38 GHz
SUB_PARTITIONS = 4
REGISTERS, MOST_THREADS, MOST_BLOCKS, SHARED_BYTES = 65536, 2048, 32, 96 << 10
REGISTER_UNIT = 256  # registers are given to a warp in this many
TENSOR_STEPS, TENSOR_CYCLES = 4, 2  # of one m8n8k4: machine instructions, and cycles of each
PIPE_CYCLES = 2  # 16 lanes of a pipe for 32 of a warp
DRAM_BYTES_PER_CYCLE = DRAM_BYTES_PER_SECOND / SMS / CLOCK_HZ / SUB_PARTITIONS
L2_BYTES_PER_CYCLE = L2_BYTES_PER_SECOND / SMS / CLOCK_HZ / SUB_PARTITIONS
TENSOR_FLOPS = SMS * SUB_PARTITIONS * 2 * 128 * CLOCK_HZ  # 125e12
PROMPT_SOURCE = "linear_prompt.cu"  # kernels that use a weight for many rows

BUDGET = re.compile(
    r"^// Budget\s+(?P<name>\S+)\s+(?P<threads>\d+) threads, <= (?P<registers>\d+) registers"
    r"(?:, (?P<shared>\d+) B shared)?(?:, <= (?P<stack>\d+) B stack)?$",
    re.MULTILINE,
)


class Budget(NamedTuple):
    threads: int
    registers: int
    shared_bytes: int
    stack_bytes: int


def read_budgets(source: Path) -> dict[str, Budget]:
    """The budget lines of a kernel file by kernel name; `*` is for all others."""
    found = {}
    for match in BUDGET.finditer(source.read_text()):
        numbers = (int(match[key] or 0) for key in ("threads", "registers", "shared", "stack"))
        found[match["name"]] = Budget(*numbers)
    return found


def blocks_per_sm(kernel: Kernel, threads: int) -> int:
    """Blocks that fit on an SM at once."""
    per_warp = -(-kernel.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    warps = -(-threads // 32)
    limits = [MOST_BLOCKS, MOST_THREADS // threads, REGISTERS // (per_warp * warps)]
    if kernel.shared_bytes:
        limits.append(SHARED_BYTES // kernel.shared_bytes)
    return min(limits)


def weight_bytes(kernel: Kernel, mix: Mix, bytes_of_32: float) -> float:
    """Bytes of weights that a warp reads in a round: 32 weights of each lane take 8 tensor instructions per 8 rows.

    Counted so and not by the loads, because some of those are made in one round of several only.
    """
    rows = re.search(r"rows(\d+)$", kernel.name)
    tiles = int(rows[1]) // 8 if rows else 1  # kernels for one row have no number
    return mix.tensor / (8 * TENSOR_STEPS * tiles) * 32 * bytes_of_32


def cycles(mix: Mix) -> dict[str, float]:
    """Cycles of a sub-partition that a warp's round takes in each unit of the SM."""
    return {
        "tensor": mix.tensor * TENSOR_CYCLES,
        "issue": mix.instructions,
        "integer": mix.integer * PIPE_CYCLES,
        "float": (mix.float + mix.half) * PIPE_CYCLES,
        "L1": mix.l1_cycles * SUB_PARTITIONS,
    }


def memory_cycles(kernel: Kernel, unit: compile_kernels.Unit, mix: Mix) -> dict[str, float]:
    """Those of the memory that feeds the SM. In a round a warp of a prompt kernel reads 32 weights for each lane."""
    assert unit.bytes_of_32 is not None
    if unit.source.name == PROMPT_SOURCE:
        return {"L2": (32 * unit.bytes_of_32 + mix.cached_bytes) / L2_BYTES_PER_CYCLE}
    return {"DRAM": weight_bytes(kernel, mix, unit.bytes_of_32) / DRAM_BYTES_PER_CYCLE}


class Row(NamedTuple):
    kernel: Kernel
    budget: Budget | None
    blocks: int | None
    loop: Mix | None
    cycles: dict[str, float]  # of linear layers: those of the SM, and DRAM where weights stream or L2 for prompts

    @property
    def is_streaming(self) -> bool:
        return "DRAM" in self.cycles

    @property
    def is_prompt(self) -> bool:
        return "L2" in self.cycles

    @property
    def limit(self) -> str:
        return max(self.cycles, key=lambda unit: self.cycles[unit])

    @property
    def slowdown(self) -> float:
        """The predicted time over that of the bytes from DRAM."""
        return self.cycles[self.limit] / self.cycles["DRAM"]

    @property
    def tera_flops(self) -> float:
        """The predicted rate when everything overlaps."""
        return TENSOR_FLOPS * self.cycles["tensor"] / self.cycles[self.limit] * 1e-12

    @property
    def least_tera_flops(self) -> float:
        """The rate when tensor instructions, other issue slots and shared memory take turns."""
        tensor = self.cycles["tensor"]
        others = self.cycles["issue"] - tensor / TENSOR_CYCLES + self.cycles["L1"]
        return min(TENSOR_FLOPS * tensor / (tensor + others) * 1e-12, self.tera_flops)

    def faults(self) -> list[str]:
        name = f"{self.kernel.unit}/{self.kernel.name}"
        if self.budget is None:
            return [f"{name}: no budget line in its source"]
        found = []
        for what, value, most in (
            ("registers", self.kernel.registers, self.budget.registers),
            ("bytes of shared memory", self.kernel.shared_bytes, self.budget.shared_bytes),
            ("bytes of stack", self.kernel.stack_bytes, self.budget.stack_bytes),
        ):
            if value > most:
                found.append(f"{name}: {value} {what}, its budget is {most}")
        if not self.blocks:
            found.append(f"{name}: no block of {self.budget.threads} threads fits on an SM")
        if self.kernel.shared_bytes > SHARED_BYTES:
            found.append(f"{name}: more shared memory than an SM has")
        return found


def report(folder: Path) -> list[Row]:
    """A row per kernel of the compiled units in `folder`."""
    rows = []
    for unit in compile_kernels.read_units():
        budgets = read_budgets(unit.source)
        for kernel in read_cubin(folder / f"{unit.name}.cubin"):
            budget = budgets.get(kernel.name) or budgets.get("*")
            blocks = blocks_per_sm(kernel, budget.threads) if budget else None
            loop = kernel.main_loop()
            costs = {}
            if loop is not None and unit.bytes_of_32 is not None:
                costs = memory_cycles(kernel, unit, loop) | cycles(loop)
            rows.append(Row(kernel, budget, blocks, loop, costs))
    return rows


def as_json(row: Row) -> dict[str, Any]:
    kernel = row.kernel
    facts: dict[str, Any] = {
        "unit": kernel.unit,
        "kernel": kernel.name,
        "registers": kernel.registers,
        "shared_bytes": kernel.shared_bytes,
        "stack_bytes": kernel.stack_bytes,
        "blocks_per_sm": row.blocks,
        "threads": row.budget.threads if row.budget else None,
        "main_loop": vars(row.loop) if row.loop else None,
    }
    if row.cycles:
        facts |= {"cycles": row.cycles, "limit": row.limit}
    if row.is_streaming:
        facts["slowdown"] = row.slowdown
    if row.is_prompt:
        facts |= {"tera_flops": row.tera_flops, "least_tera_flops": row.least_tera_flops}
    return facts


def resource_line(row: Row) -> str:
    kernel = row.kernel
    warps = (row.blocks or 0) * (row.budget.threads if row.budget else 0) // 32
    spilled = f"{kernel.stack_bytes} B stack" if kernel.stack_bytes else ""
    line = f"{kernel.unit:20} {kernel.name:14} {kernel.registers:4} registers {kernel.shared_bytes:6} B shared"
    line += f" {row.blocks or 0:3} blocks {warps:3} warps per SM {spilled}"
    if row.is_streaming:
        line += f"  {row.limit} {row.slowdown:.2f}x"
    if row.is_prompt:
        line += f"  {row.limit}, {row.least_tera_flops:.0f} to {row.tera_flops:.0f} TFLOP/s"
    return line.rstrip()


def occupancy(row: Row) -> str:
    threads = row.budget.threads if row.budget else 0
    return f"{row.kernel.unit} {row.kernel.name} | {row.kernel.registers} | {(row.blocks or 0) * threads // 32}"


def streaming_table(rows: list[Row]) -> str:
    """The table of the kernels that stream weights, in Markdown."""
    lines = [
        "| kernel | registers | warps per SM | tensor | issue | integer | float | L1 | limit | time / DRAM time |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.is_streaming:
            units = ("tensor", "issue", "integer", "float", "L1")
            shares = " | ".join(f"{row.cycles[unit] / row.cycles['DRAM']:.2f}" for unit in units)
            lines.append(f"| {occupancy(row)} | {shares} | {row.limit} | {row.slowdown:.2f} |")
    return "\n".join(lines) + "\n"


def prompt_table(rows: list[Row]) -> str:
    """The same of the kernels of prompts."""
    lines = [
        "| kernel | registers | warps per SM | issue | integer | float | L1 | L2 | limit | TFLOP/s | without overlap |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.is_prompt:
            units = ("issue", "integer", "float", "L1", "L2")
            shares = " | ".join(f"{row.cycles[unit] / row.cycles['tensor']:.2f}" for unit in units)
            rates = f"{row.tera_flops:.0f} | {row.least_tera_flops:.0f}"
            lines.append(f"| {occupancy(row)} | {shares} | {row.limit} | {rates} |")
    return "\n".join(lines) + "\n"


TABLES = {"streaming": streaming_table, "prompt": prompt_table}
END = "<!-- end -->\n"


def document_with(rows: list[Row]) -> str:
    """docs/kernels.md with the tables of these kernels."""
    text = DOCUMENT.read_text()
    for name, table in TABLES.items():
        before, rest = text.split(f"<!-- begin {name}: written by scripts/kernel_report.py --docs -->\n")
        begin = text[len(before) : len(text) - len(rest)]
        text = before + begin + table(rows) + END + rest.split(END, 1)[1]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Resources and predicted times of the CUDA kernels on a V100.")
    parser.add_argument("--kernels", type=Path, help="folder of compiled kernels; compiled now if it is not given")
    parser.add_argument("--check", action="store_true", help="exit 1 when a budget is overrun or missing")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/kernels.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.kernels or Path(temporary)
        if arguments.kernels is None:
            try:
                compile_kernels.compile_all(folder, jobs=2)
            except compile_kernels.CompileError as error:
                print(error, file=sys.stderr)
                return 1
        rows = report(folder)
    faults = [fault for row in rows for fault in row.faults()]
    if arguments.docs:
        DOCUMENT.write_text(document_with(rows))
    if arguments.json:
        print(json.dumps([as_json(row) for row in rows], indent=1))
    else:
        print("\n".join(resource_line(row) for row in rows))
    for fault in faults:
        print(f"over budget: {fault}", file=sys.stderr)
    worst = max((row for row in rows if row.is_streaming), key=lambda row: row.slowdown, default=None)
    slowest = f"; slowest loop {worst.kernel.unit}/{worst.kernel.name} {worst.slowdown:.2f}x of DRAM" if worst else ""
    print(f"{len(rows)} kernels, {len(faults)} over budget{slowest}")
    return 1 if arguments.check and faults else 0


if __name__ == "__main__":
    sys.exit(main())
