"""Every kernel compiles for sm_80 and sm_90 on this machine, does not spill, and moves its rows 128 bits at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90)
# Instructions that move anything but rows: statistics, vectors of a tile, sample numbers, scalars, a row of AdamW's
# table, partial sums.
NARROW_LOADS = {"adamw": 13, "layer_norm_backward": 6, "dropout_forward": 3, "dropout_backward": 6,
                "add_norm_backward": 6, "dropout_norm_forward": 2, "dropout_norm_backward": 10, "cross_entropy_both": 6,
                "cross_entropy_statistics": 4, "cross_entropy_loss": 4,
                "cross_entropy_mend": 6}  # fmt: skip
NARROW_STORES = {"cross_entropy_statistics": 4, "cross_entropy_both": 3}
SMALL = ("sum_partials", "total")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    """Architecture -> case -> what ``aot_gate.py`` read. One process each, side by side."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))  # compiled now, not found from before
    gates = {
        arch: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.aot_gate", str(arch)],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for arch in ARCHITECTURES
    }  # fmt: skip
    result = {}
    for arch, gate in gates.items():
        out, err = gate.communicate()
        assert gate.returncode == 0, f"sm_{arch}: {err[-3000:]}"
        result[arch] = {row["case"]: row for row in map(json.loads, out.splitlines())}
    return result


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_spills(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    assert len(measured[arch]) == 2 * (3 * 4 + 2 + 12) + 2 + (3 + 2 * 5 + 2 * 4 + 1 + 1) + (arch == 90) * (5 + 4)
    assert {case: row["text"] for case, row in measured[arch].items() if row["spill_bytes"]} == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_move_128_bits_at_a_time(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    bad = {}
    for case, row in measured[arch].items():
        name = case.split("/")[0]
        loads = sum((n for part in ("loads", "async_loads") for bits, n in row[part].items() if int(bits) < 128), 0)
        wide_loads = row["loads"].get("128", 0) + row["async_loads"].get("128", 0)
        wide_stores = row["stores"].get("128", 0)
        sums_only = name in ("column_sum", "sum_of_squares", "cross_entropy_statistics", "cross_entropy_loss")
        narrow_stores = sum(n for bits, n in row["stores"].items() if int(bits) < 128)
        allowed = loads <= NARROW_LOADS.get(name, 1) and narrow_stores <= NARROW_STORES.get(name, 2)
        if name not in SMALL and not (allowed and wide_loads and (wide_stores or sums_only)):
            bad[case] = row["text"]
    assert bad == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loops_load_ahead(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    loops = ("layer_norm_backward", "bias_gelu_backward", "dropout_backward", "column_sum", "long_softmax_forward",
             "long_softmax_backward", "sum_of_squares", "add_norm_backward", "dropout_norm_backward",
             "cross_entropy_statistics", "cross_entropy_loss", "cross_entropy_both",
             "bias_gelu_backward_with_activation")  # fmt: skip
    rows = {case: row for case, row in measured[arch].items() if case.split("/")[0] in loops}
    assert {case: row["text"] for case, row in rows.items() if not row["async_loads"].get("128")} == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_row_offsets_are_64_bit(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    assert {case: row["narrow_offsets"] for case, row in measured[arch].items() if row["narrow_offsets"]} == {}
