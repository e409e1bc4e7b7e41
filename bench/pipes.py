"""Instructions of a compiled loop by the pipe that executes them: the pipe model of kernels that compute much per byte.

A multiprocessor issues 128 of a thread's instructions per cycle; the pipes behind take 128 floating-point, 64 integer
multiply-adds, 64 logic, compare and conversion, and 16 special functions. What a kernel needs of each, times elements,
bounds its time from below as its bytes do.
"""

from __future__ import annotations

import re
from collections import Counter

ISSUED_PER_SECOND = {"H100": 128 * 132 * 1.755e9, "H200": 128 * 132 * 1.83e9}
"""Instructions of a thread, over the whole GPU at its boost clock."""

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_.]*)(?P<rest>[^;]*);", re.M
)
_PIPES = (
    ("tensor", r"[A-Z]*MMA"),
    ("special", r"MUFU"),
    ("multiply", r"IMAD"),
    ("float", r"F(FMA|MUL|ADD)2?$"),
    ("memory", r"(LD|ST|ATOM|RED|SHFL|BAR|DEPBAR|SYNCS)"),
    ("uniform", r"(U[A-Z]|R2UR)"),
    ("control", r"(BRA|NOP|WARP|CALL|BSSY|BSYNC|EXIT|YIELD|CS2R)"),
)


def pipe(opcode: str) -> str:
    """The pipe of an instruction; "logic" where nothing else takes it."""
    head = opcode.partition(".")[0]
    return next((name for name, pattern in _PIPES if re.match(pattern, head)), "logic")


def loops(sass: str) -> list[Counter[str]]:
    """Instructions by pipe of every innermost loop that multiplies matrices, in the order of the code."""
    code = [(int(m["at"], 16), m["op"], m["rest"]) for m in _INSTRUCTION.finditer(sass)]
    spans = set()
    for at, op, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            spans.add((int(target[1], 16), at))
    innermost = [
        span for span in sorted(spans) if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in spans)
    ]
    counts = [Counter(pipe(op) for at, op, _ in code if first <= at <= last) for first, last in innermost]
    return [count for count in counts if count["tensor"]]
