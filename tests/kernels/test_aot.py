"""Every kernel compiles for sm_90 on this machine, and the main ones for sm_80 and sm_100, without a spill and so that
rows move 128 bits at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trimegatron.bench.traffic import ROWS_PER_TILE

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 100)
ON_ALL = tuple(
    f"{name}/bfloat16"
    for name in ("layer_norm_forward/4096", "layer_norm_backward/4096", "layer_norm_backward_in_parts/16384",
                 "causal_softmax_forward/4096", "causal_softmax_backward/4096", "softmax_dropout_forward/4096",
                 "softmax_dropout_backward/4096", "long_softmax_dropout_backward/768", "dropout_norm_backward/4096",
                 "cross_entropy_both/50304", "bias_gelu_backward/768", "dropout_backward/768", "adamw/768")
)  # fmt: skip
"""Cases that are compiled for all architectures; the others for sm_90, and for all in the long form of the tests."""
# Instructions that move anything but rows: statistics, vectors of a tile, sample numbers, scalars, a row of AdamW's
# table, partial sums.
NARROW_LOADS = {"adamw": 13, "layer_norm_backward": 6, "layer_norm_backward_in_parts": 6, "dropout_forward": 3,
                "dropout_backward": 6, "softmax_dropout_backward": 3, "long_masked_softmax": 8,
                "long_softmax_dropout_forward": 4, "long_softmax_dropout_backward": 10, "add_norm_backward": 6,
                "dropout_norm_forward": 2, "dropout_norm_backward": 10, "cross_entropy_both": 6,
                "cross_entropy_statistics": 4, "cross_entropy_loss": 4, "cross_entropy_mend": 6}  # fmt: skip
NARROW_STORES = {"cross_entropy_statistics": 4, "cross_entropy_both": 3}
SMALL = ("sum_partials", "total")
BUSY = {"dropout_forward": 0.58, "dropout_backward": 0.71, "dropout_norm_forward": 0.7, "dropout_norm_backward": 0.67,
        "attention_dropout": 0.93, "softmax_dropout_forward": 2.5, "softmax_dropout_backward": 1.9,
        "softmax_dropout_forward/4096": 1.87, "softmax_dropout_backward/4096": 1.52,
        "long_softmax_dropout_forward": 1.42, "long_softmax_dropout_backward": 1.45,
        "causal_softmax_forward": 1.25, "long_softmax_forward": 1.1, "long_masked_softmax": 1.25,
        "cross_entropy_both": 1.35, "cross_entropy_statistics": 1.12, "cross_entropy_loss": 1.12,
        "bias_gelu_backward_erf": 1.2}  # fmt: skip
"""The least time of a kernel's instructions over that of its bytes, on an H200 in bf16; of a kernel that is not here 1.
Above 1 the instructions are the limit. An H100, whose memory is slower, has 0.73 of it."""


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.long)])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, dict[str, Any]]]:
    """Architecture -> case -> what ``aot_gate.py`` read. One process each, side by side."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))  # compiled now, not found from before
    gates = {
        arch: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.aot_gate", str(arch),
             *(() if arch == 90 or request.param == "all" else ON_ALL)],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for arch in ARCHITECTURES
    }  # fmt: skip
    result = {}
    for arch, gate in gates.items():
        out, err = gate.communicate()
        assert gate.returncode == 0, f"sm_{arch}: {err[-3000:]}"
        result[arch] = {row["case"]: row for row in map(json.loads, out.splitlines())}
    half, single = 4 * 6 + 2 + 15 + (3 * 3 + 1) + (2 * 4 + 1) + 1 + 2, 2 * 6 + 2 + 15
    other = len(ON_ALL) if request.param == "some" else half + single
    assert {arch: len(rows) for arch, rows in result.items()} == {80: other, 90: half + single + 3 + 4, 100: other}
    return result


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_spills(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
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
def test_rows_move_as_often_as_the_table_says(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    """Bytes of the load and store instructions of one program, against the rows of its tile. A pipelined loop's loads
    stand there once for each stage; vectors may be loaded once for each row of a tile."""
    bad = {}
    for case, row in measured[arch].items():
        name, _, dtype = case.split("/")
        if name not in ROWS_PER_TILE:
            continue
        moves, tile_bytes = ROWS_PER_TILE[name], row["tile"] * getattr(torch, dtype).itemsize
        loaded = moves.reads * tile_bytes * (row["num_stages"] * moves.loops or 1)
        stored = moves.writes * tile_bytes
        reads_right = loaded <= row["loaded_bytes"] <= loaded + moves.vectors * tile_bytes
        # The zeros of a long causal row, and the partial sums of a loop over rows, are stored beside the rows.
        writes_right = row["stored_bytes"] >= stored if moves.loops else row["stored_bytes"] == stored
        if not (reads_right and writes_right):
            bad[case] = f"{loaded} B to load, {row['loaded_bytes']} B loaded; {stored} B to store: {row['text']}"
    assert bad == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_row_kernels_keep_40_kb_in_flight(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    """Of each multiprocessor, at hidden 4096: what covers the latency of memory."""
    names = ("layer_norm_forward", "layer_norm_backward", "causal_softmax_forward", "causal_softmax_backward",
             "softmax_dropout_forward", "softmax_dropout_backward")  # fmt: skip
    rows = {name: measured[arch][f"{name}/4096/bfloat16"] for name in names}
    assert {name: row["text"] for name, row in rows.items() if row["bytes_in_flight"] < 40 << 10} == {}


def test_instructions_take_less_time_than_bytes_but_for_the_table(
    measured: dict[int, dict[str, dict[str, Any]]],
) -> None:
    bad = {}
    for case, row in measured[90].items():
        most = BUSY.get(case.rpartition("/")[0], BUSY.get(case.split("/")[0], 1.0))
        if row["busy"]["H200"] > most:
            bad[case] = f"{row['busy']['H200']:.2f} of at most {most}: {row['text']}"
    assert bad == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loops_load_ahead(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    loops = ("layer_norm_backward", "layer_norm_backward_in_parts", "bias_gelu_backward", "dropout_backward",
             "column_sum", "long_softmax_forward", "long_softmax_backward", "long_masked_softmax",
             "long_softmax_dropout_forward", "long_softmax_dropout_backward", "sum_of_squares", "add_norm_backward",
             "dropout_norm_backward", "cross_entropy_statistics", "cross_entropy_loss", "cross_entropy_both",
             "bias_gelu_backward_with_activation")  # fmt: skip
    rows = {case: row for case, row in measured[arch].items() if case.split("/")[0] in loops}
    assert {case: row["text"] for case, row in rows.items() if not row["async_loads"].get("128")} == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_row_offsets_are_64_bit(measured: dict[int, dict[str, dict[str, Any]]], arch: int) -> None:
    assert {case: row["narrow_offsets"] for case, row in measured[arch].items() if row["narrow_offsets"]} == {}
