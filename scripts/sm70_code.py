"""Reads SM70 machine code: the kernels of a cubin, their resources, their instructions and their main loop.

A cubin is an ELF file; `.text.NAME` is a kernel's code and the top byte of its `sh_info` its registers. An instruction
is 16 bytes: bits 0..8 say what it is, 9..11 where the operands come from, 12..15 the predicate. A branch has its
distance in bits 32..63, from the instruction after it. The numbers below were read off `nvdisasm` of CUDA 12.4 over our
kernels.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTION_BYTES = 16
STACK_OF_KERNEL = 0x11  # entries of .nv.info: frame size of a function

# What an instruction is (bits 0..8), by the unit that executes it. Anything else is integer arithmetic.
TENSOR = {0x036: "HMMA"}
HALF = {0x030: "HADD2", 0x031: "HFMA2", 0x032: "HMUL2"}
FLOAT = {0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA", 0x024: "IMAD", 0x025: "IMAD.WIDE", 0x027: "IMAD.HI"}
SPECIAL = {0x102: "FCHK", 0x104: "F2F", 0x105: "F2I", 0x106: "I2F", 0x108: "MUFU", 0x111: "F2I", 0x112: "I2F"}
CONTROL = {
    0x118: "NOP", 0x11D: "BAR", 0x141: "BSYNC", 0x144: "CALL", 0x145: "BSSY", 0x147: "BRA", 0x148: "WARPSYNC",
    0x14D: "EXIT", 0x150: "RET", 0x155: "BMOV",
}  # fmt: skip
LOAD_GLOBAL, STORE_GLOBAL, LOAD_SHARED, STORE_SHARED, LOAD_LOCAL, STORE_LOCAL = 0x181, 0x186, 0x184, 0x188, 0x183, 0x187
SHUFFLE, LOAD_CONSTANT = 0x189, 0x182
MEMORY = {LOAD_GLOBAL, STORE_GLOBAL, LOAD_SHARED, STORE_SHARED, LOAD_LOCAL, STORE_LOCAL}
WIDTHS = (1, 1, 2, 2, 4, 8, 16, 16)  # bytes per lane, bits 73..75
BRANCH, NO_OPERATION = 0x147, 0x118


@dataclass(frozen=True)
class Instruction:
    low: int
    high: int

    @property
    def operation(self) -> int:
        return self.low & 0x1FF

    @property
    def width(self) -> int:
        """Bytes per lane of a memory access."""
        return WIDTHS[self.high >> 9 & 7]

    @property
    def is_streaming(self) -> bool:
        """A load that does not stay in L1."""
        return self.operation == LOAD_GLOBAL and bool(self.high >> 22 & 1)

    @property
    def branch_bytes(self) -> int:
        distance = self.low >> 32
        return distance - (1 << 32) if distance >> 31 else distance


@dataclass
class Mix:
    """Instructions of a stretch of code by unit, and what its memory accesses move, per warp."""

    instructions: int = 0
    tensor: int = 0
    half: int = 0
    float: int = 0
    integer: int = 0
    special: int = 0
    shared: int = 0
    local: int = 0
    global_loads: int = 0
    stream_bytes: int = 0  # of loads that are read once: weights
    cached_bytes: int = 0  # of the other global loads
    l1_cycles: int = 0  # of all global and shared accesses: 128 bytes a cycle, a warp's access at least one

    @classmethod
    def of(cls, code: list[Instruction]) -> Mix:
        mix = cls()
        for instruction in code:
            mix.add(instruction)
        return mix

    def add(self, instruction: Instruction) -> None:
        operation = instruction.operation
        if operation == NO_OPERATION:
            return
        self.instructions += 1
        if operation in TENSOR:
            self.tensor += 1
        elif operation in HALF:
            self.half += 1
        elif operation in FLOAT:
            self.float += 1
        elif operation in SPECIAL:
            self.special += 1
        elif operation in (LOAD_SHARED, STORE_SHARED, SHUFFLE):
            self.shared += 1
        elif operation in (LOAD_LOCAL, STORE_LOCAL):
            self.local += 1
        elif operation == LOAD_GLOBAL:
            self.global_loads += 1
            if instruction.is_streaming:
                self.stream_bytes += 32 * instruction.width
            else:
                self.cached_bytes += 32 * instruction.width
        elif operation not in CONTROL and operation != LOAD_CONSTANT and operation != STORE_GLOBAL:
            self.integer += 1
        if operation in MEMORY or operation == SHUFFLE:
            self.l1_cycles += max(1, instruction.width // 4) if operation in MEMORY else 1


@dataclass
class Kernel:
    unit: str
    name: str
    registers: int
    shared_bytes: int  # static
    stack_bytes: int
    code: list[Instruction] = field(repr=False)

    def loops(self) -> list[tuple[int, int]]:
        """[begin, end) of every backward branch's stretch, in instructions."""
        found = []
        for at, instruction in enumerate(self.code):
            if instruction.operation == BRANCH and instruction.branch_bytes < 0:
                begin = at + 1 + instruction.branch_bytes // INSTRUCTION_BYTES
                if begin < at:  # a branch to itself is the trap after the end
                    found.append((begin, at + 1))
        return found

    def main_loop(self) -> Mix | None:
        """The loop that computes: with the most tensor instructions, else streamed bytes, else loads."""
        mixes = [Mix.of(self.code[begin:end]) for begin, end in self.loops()]
        return max(mixes, key=lambda mix: (mix.tensor, mix.stream_bytes, mix.global_loads), default=None)


def read_cubin(path: Path) -> list[Kernel]:
    """The kernels of a cubin, in the order of their names."""
    raw = path.read_bytes()
    if raw[:4] != b"\x7fELF":
        raise ValueError(f"{path}: not an ELF file")
    header_at, entry_bytes, n_entries, names_at = struct.unpack_from("<Q10xHHH", raw, 0x28)
    headers = [struct.unpack_from("<IIQQQQIIQQ", raw, header_at + i * entry_bytes) for i in range(n_entries)]

    def text(table: bytes, at: int) -> str:
        return table[at : table.index(b"\0", at)].decode()

    names = raw[headers[names_at][4] :][: headers[names_at][5]]
    sections = {text(names, header[0]): header for header in headers}
    symbols = _symbol_names(raw, sections)
    frames = _frames(raw, sections)
    kernels = []
    for section, header in sections.items():
        if not section.startswith(".text."):
            continue
        name = section.removeprefix(".text.")
        body = raw[header[4] : header[4] + header[5]]
        code = [Instruction(*pair) for pair in struct.iter_unpack("<QQ", body)]
        shared = sections.get(f".nv.shared.{name}")
        stack = max((size for symbol, size in frames if symbols.get(symbol) == name), default=0)
        kernels.append(Kernel(path.stem, name, header[7] >> 24, shared[5] if shared else 0, stack, code))
    return sorted(kernels, key=lambda kernel: kernel.name)


def _symbol_names(raw: bytes, sections: dict[str, tuple[int, ...]]) -> dict[int, str]:
    table, strings = sections[".symtab"], sections[".strtab"]
    body = raw[table[4] : table[4] + table[5]]
    names = raw[strings[4] : strings[4] + strings[5]]
    entries = struct.iter_unpack("<IBBHQQ", body)
    return {i: names[entry[0] : names.index(b"\0", entry[0])].decode() for i, entry in enumerate(entries)}


def _frames(raw: bytes, sections: dict[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    # (symbol, bytes of stack) of the functions. An entry is format, attribute, and a size or a value of 16 bits.
    info = sections.get(".nv.info")
    if info is None:
        return []
    at, end, found = info[4], info[4] + info[5], []
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", raw, at)
        at += 4
        if form != 4:  # the value is in the entry
            continue
        if attribute == STACK_OF_KERNEL:
            found.append(struct.unpack_from("<II", raw, at))
        at += value
    return found
