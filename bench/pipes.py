"""The pipe model: how long the instructions of a compiled kernel keep a GPU busy, beside how long its bytes do.

A multiprocessor starts so many instructions of threads in a cycle (``LANES``), and each pipe behind it takes so many.
What a kernel needs of each bounds its time from below, as its bytes and its products of matrices do: the largest of
these bounds says what limits the kernel, and a kernel is limited by memory where no pipe's is above it. Waiting is not
modelled: for that see the bytes in flight.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple


class Device(NamedTuple):
    """A GPU of compute capability 9.0."""

    clock: float
    """Cycles a second."""
    bandwidth: float
    """Bytes a second that a copy reaches, not those of the data sheet."""
    multiprocessors: int = 132


DEVICES = {"H100": Device(1.755e9, 3.0e12), "H200": Device(1.83e9, 4.3e12)}

LANES = {"issue": 128, "float": 128, "multiply": 64, "logic": 64, "special": 16}
"""Instructions of a thread that a multiprocessor takes in a cycle. "multiply" is integer multiply-add, "logic" also
compare, shift and conversion. Source: CUDA C++ Programming Guide, throughput of native arithmetic instructions."""

TENSOR_FLOPS = 4096
"""Floating-point operations of half-precision products, dense, that a multiprocessor makes in a cycle."""

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_.]*)(?P<rest>[^;]*);", re.M
)
_PIPES = (
    ("tensor", r"[A-Z]*MMA"),
    ("special", r"MUFU"),
    ("multiply", r"IMAD"),
    ("float", r"F(FMA|MUL|ADD)2?$"),
    ("spill", r"(LDL|STL)"),
    ("memory", r"(LD|ST|ATOM|RED|SHFL|BAR|DEPBAR|SYNCS)"),
    ("uniform", r"(U[A-Z]|R2UR)"),
    ("control", r"(BRA|NOP|WARP|CALL|BSSY|BSYNC|EXIT|YIELD|CS2R)"),
)


def pipe(opcode: str) -> str:
    """The pipe of an instruction; "logic" where nothing else takes it."""
    head = opcode.partition(".")[0]
    return next((name for name, pattern in _PIPES if re.match(pattern, head)), "logic")


def _code(sass: str) -> list[tuple[int, str, str]]:
    """(address, opcode, operands) of every instruction that does something."""
    code = [(int(m["at"], 16), m["op"], m["rest"]) for m in _INSTRUCTION.finditer(sass)]
    return [line for line in code if line[1] != "NOP"]


def whole(sass: str) -> Counter[str]:
    """Instructions by pipe of a kernel, each once."""
    return Counter(pipe(op) for _, op, _ in _code(sass))


def loops(sass: str) -> list[Counter[str]]:
    """Instructions by pipe of every innermost loop, in the order of the code."""
    code = _code(sass)
    spans = set()
    for at, op, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.add((int(target[1], 16), at))
    innermost = [
        span for span in sorted(spans) if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in spans)
    ]
    return [Counter(pipe(op) for at, op, _ in code if first <= at <= last) for first, last in innermost]


def busiest(instructions: Counter[str], elements: float) -> tuple[str, float]:
    """The pipe that takes longest, and its cycles for each element, where a thread's ``instructions`` serve
    ``elements`` elements."""
    counts = {"issue": instructions.total(), **instructions}
    cycles = {name: counts.get(name, 0) / lanes / elements for name, lanes in LANES.items()}
    return max(cycles.items(), key=lambda item: item[1])
