"""Flash attention compiles for GPUs this machine does not have, without a spill and within a budget of instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trimegatron.bench import pipes

ROOT = Path(__file__).parents[2]

# Instructions per score of the loop without the diagonal, tensor cores' apart, with dropout.
BUDGET = {
    (80, "forward"): 16.5, (80, "queries"): 14.5, (80, "keys"): 20.0,
    (90, "forward"): 16.0, (90, "queries"): 15.5, (90, "keys"): 20.0,
}  # fmt: skip
SPILLS = {(80, "forward/72/bfloat16/dropout"): 96}
"""Bytes a thread: the columns that fill a head of 72 up to 128 take registers for their masks. They are the addresses
of the result, put away before the loops and taken back behind them, once a program; tiles without a spill take more
instructions a score."""
BUSY = {"forward": 2.0, "queries": 1.35, "keys": 1.35}
"""The least time of the loop's instructions over that of its products, on an H100 and an H200. Of a head of 128, whose
products are twice as many, it is 1.2, 0.75 and 0.8. The bytes take less than either."""
PIPES = {"multiply": 4.1, "special": 1.1}
"""Philox takes 3.5 integer multiply-adds a score: eight draws a call, 14 products, each a low and a high word."""


def gate(arch: int, cache: Path, *cases: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.flash_gate", str(arch), *cases],
        cwd=ROOT, env=environment, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]]) -> None:
    """No spill, 64-bit offsets, and tiles that move 128 bits at a time."""
    assert {row["case"]: row["text"] for row in rows if row["spill_bytes"]} == {}
    assert {row["case"]: row["narrow_offsets"] for row in rows if row["narrow_offsets"]} == {}
    for row in rows:
        wide = row["loads"].get("128", 0) + row["async_loads"].get("128", 0)
        narrow = {bits: n for part in ("loads", "async_loads") for bits, n in row[part].items() if int(bits) < 64}
        assert wide and row["stores"].get("128") and set(narrow) <= {"32"}, row["text"]


@pytest.mark.parametrize("arch", [80, 90])
def test_head_size_64_with_dropout(arch: int, tmp_path: Path) -> None:
    kernels = ("forward", "queries", "keys")
    rows = gate(arch, tmp_path, *(f"{kernel}/64/bfloat16/dropout" for kernel in kernels))
    assert len(rows) == 3
    check(rows)
    for kernel, row in zip(kernels, rows, strict=True):
        taken = row["per_score"]
        assert sum(n for pipe, n in taken.items() if pipe != "tensor") <= BUDGET[arch, kernel], row["case"]
        assert all(taken[pipe] <= most for pipe, most in PIPES.items()), row["case"]
        for limits in row["busy"].values() if arch == 90 else ():
            assert limits["memory"] < limits["products"] < limits["instructions"] <= BUSY[kernel] * limits["products"]
        assert sum("tensor" in loop for loop in row["loops"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_case(arch: int, tmp_path: Path) -> None:
    rows = gate(arch, tmp_path)
    assert len(rows) == 3 * 8
    for row in rows:
        assert row["spill_bytes"] <= SPILLS.get((arch, row["case"]), 0), row["text"]
        assert not any("spill" in loop for loop in row["loops"]), row["text"]
    check([row for row in rows if "float32" not in row["case"] and not row["spill_bytes"]])


def test_pipes() -> None:
    """A loop within a loop, its instructions by pipe, and what is busy longest."""
    lines = ["MOV R1, R2", "IMAD.HI.U32 R1, R2, R3, R4", "HMMA.16816.F32 R4, R8, R12, R4", "@P0 MUFU.EX2 R1, R1",
             "FFMA R1, R2, R3, R4", "LOP3.LUT R1, R2, R3, RZ, 0x96, !PT", "LDSM.16.M88.4 R4, [R1]",
             "UIADD3 UR4, UR4, 0x1, URZ", "@P1 BRA 0x0010", "@P2 BRA 0x0000", "NOP", "BRA 0x00a0"]  # fmt: skip
    sass = "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))
    loop, empty = pipes.loops(sass)
    assert loop == dict.fromkeys(("multiply", "tensor", "special", "float", "logic", "memory", "uniform", "control"), 1)
    assert empty == {"control": 1}
    assert pipes.whole(sass) == loop + Counter(logic=1, control=2)
    assert pipes.busiest(loop, 2) == ("issue", 8 / 128 / 2)
    assert pipes.busiest(Counter(special=1, logic=2), 2) == ("special", 1 / 16 / 2)
