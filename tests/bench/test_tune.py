"""The search for launch configurations: what is tried, what may win, and all of it without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import tiny_flags
from trimegatron.bench import kernel_cases, tune
from trimegatron.bench.aot import Code
from trimegatron.bench.tuning import machine as tuning_machine
from trimegatron.bench.tuning import works as tuning_works
from trimegatron.bench.tuning.interpreter import Interpreter
from trimegatron.bench.tuning.machine import Machine, driver_version
from trimegatron.bench.tuning.search import MARGIN, Found, Tools, search
from trimegatron.bench.tuning.targets import Settings, Target, Work, candidates, targets, unfit, wide_share
from trimegatron.cli import main
from trimegatron.errors import ConfigError
from trimegatron.kernels import tables
from trimegatron.kernels.configs import TUNED_OPS

ROOT = Path(__file__).parents[2]
CODE = Code(90, 4, 1, 32, 0, 1024, loads=Counter({128: 4}), stores=Counter({128: 2}))


def target(op: str, hidden: int = 64, dtype: str = "float32", group: str = "norm_cases") -> Target:
    (found,) = targets([Work(group, 16, hidden, dtype)], [op], 90)
    return found


@pytest.fixture(scope="module")
def norm() -> Target:
    return target("layer_norm_forward")


def tools(seconds: Any, **changes: Any) -> Tools:
    """A machine on which everything compiles, is right, and takes what ``seconds`` says of its settings."""
    return Tools(**{"compile": lambda target, settings: CODE, "why_wrong": lambda target, settings: None,
                    "seconds": seconds, "shared_limit": 100 << 10, "clock": lambda: 0.0} | changes)  # fmt: skip


def all_works(dtype: str = "bfloat16") -> list[Work]:
    groups = [group.__name__ for group in kernel_cases.GROUPS]
    works = [Work(name, 64, hidden, dtype) for name in groups for hidden in (64, 32768)]
    return [*works, Work("optimizer_cases", 1, 1 << 16, dtype)]


def test_every_kernel_can_be_tuned_and_says_what_its_choice_depends_on() -> None:
    found = targets(all_works(), list(TUNED_OPS), 90)
    assert {found.key[0] for found in found} == set(TUNED_OPS)
    for this in found:
        op = TUNED_OPS[this.key[0]]
        assert {name for name, _ in this.key[2]} == set(op.shape), this
        assert {**this.default}.keys() == set(op.parameters)
        assert this.default.get("columns", op.least_columns) >= op.least_columns
        assert candidates(this), this


def test_candidates_are_near_and_can_be_in_a_table(norm: Target) -> None:
    assert norm.default == {"rows": 16, "num_warps": 4}
    tried = candidates(norm)
    assert norm.default not in tried and len({tuple(s.items()) for s in tried}) == len(tried)
    assert {tuple(s.values()) for s in tried[:4]} == {(8, 4), (32, 4), (16, 2), (16, 8)}
    assert all(1 <= s["num_warps"] <= 32 and s["rows"] * 64 >= 32 * s["num_warps"] for s in tried)


def test_what_the_compiled_code_rules_out() -> None:
    def code(**changes: Any) -> Code:
        return Code(**{**vars(CODE), **changes})

    assert unfit(code(registers=255, shared_bytes=99 << 10), CODE, 100 << 10) is None
    assert unfit(code(spill_bytes=8), CODE, 100 << 10) == "spills 8 B a thread"
    assert unfit(code(spill_bytes=8), code(spill_bytes=96), 100 << 10) is None
    assert unfit(code(shared_bytes=101 << 10), CODE, 100 << 10) == "takes 103424 B of shared memory, there are 102400"
    assert unfit(code(loads=Counter({128: 1, 16: 24})), CODE, 100 << 10) == "loses 128-bit loads"
    assert unfit(code(loads=Counter(), async_loads=Counter({128: 4, 32: 2})), CODE, 100 << 10) is None
    assert unfit(code(stores=Counter({64: 4})), CODE, 100 << 10) == "loses 128-bit stores"
    assert unfit(code(stores=Counter({64: 4})), code(stores=Counter({32: 1})), 100 << 10) is None
    assert wide_share(Counter({128: 1, 64: 2})) == 0.5 and wide_share(Counter()) == 1.0


@pytest.mark.parametrize(("gain", "wins"), [(1.0, False), (MARGIN - 0.001, False), (MARGIN + 0.001, True)])
def test_three_percent(norm: Target, gain: float, wins: bool) -> None:
    fast = {"rows": 8, "num_warps": 4}
    found = search(norm, tools(lambda _, s: [1.0 / gain] * 5 if s == fast else [1.0] * 5), 1.0)
    assert found.winner is not None and found.winner.settings == (fast if wins else norm.default)
    assert len(found.candidates) == 1 + len(candidates(norm)) and found.left_out == 0
    assert found.record(64, 1.0)["is_default"] is not wins


def test_a_lucky_run_does_not_win(norm: Target) -> None:
    """What was fast once is timed again beside the default."""
    fast, calls = {"rows": 8, "num_warps": 4}, Counter[bool]()

    def seconds(_: Target, settings: Settings) -> list[float]:
        calls[settings == fast] += 1
        return [0.5] * 5 if settings == fast and calls[True] == 1 else [1.0] * 5

    assert search(norm, tools(seconds), 1.0).winner.settings == norm.default  # type: ignore[union-attr]
    assert calls[True] == 4


def test_the_budget_leaves_out_the_farthest(norm: Target) -> None:
    now = iter(range(100))
    found = search(norm, tools(lambda *_: [1.0], clock=lambda: next(now)), 3)
    assert [c.settings for c in found.candidates] == [norm.default, *candidates(norm)[:3]]
    assert found.left_out == len(candidates(norm)) - 3 and "left out, the time was up" in found.text()
    found = search(norm, tools(lambda *_: [1.0]), 0)
    assert found.winner is None and found.text().endswith("no record")


def test_the_budget_is_shared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a clock that goes on by 1 with each timing, ten are enough for the first half of the kernels."""
    time = [0.0]

    def seconds(*_: Any) -> list[float]:
        time[0] += 1
        return [1.0]

    machine = Machine(tools(seconds, clock=lambda: time[0]), 90, 1.0)
    records, all_right = tune.search_all([Work("norm_cases", 16, 64, "float32")], list(TUNED_OPS), machine, 10)
    assert [record["op"] for record in records] == ["layer_norm_forward", "layer_norm_backward"] and all_right
    assert [len(record["candidates"]) for record in records] == [5, 5]
    tune.search_all([Work("norm_cases", 16, 64, "float32")], list(TUNED_OPS), machine, 0)
    assert capsys.readouterr().out.splitlines()[-1].startswith("left out, the time was up: layer_norm_forward float32")


def test_what_is_wrong_cannot_win(norm: Target) -> None:
    """However fast. Tiles narrower than a row, which no table may ask for, are what the interpreter is shown here."""
    narrow = {"rows": 16, "columns": 32, "num_warps": 4}
    with Interpreter() as interpreter:
        assert interpreter.why_wrong(norm, norm.default) is None
        reason = interpreter.why_wrong(norm, narrow)
        backward = target("cross_entropy_gradient", 100, "bfloat16", "cross_entropy_cases")
        assert interpreter.why_wrong(backward, candidates(backward)[0]) is None
    assert reason and reason.startswith("AssertionError: layer_norm_forward 48×64 float32")

    def why_wrong(_: Target, settings: Settings) -> str | None:
        return reason if settings["rows"] == 8 else None

    found = search(norm, tools(lambda _, s: [0.1 if s["rows"] == 8 else 1.0], why_wrong=why_wrong), 1.0)
    assert found.winner is found.default
    wrong = [c for c in found.candidates if c.outcome == "wrong"]
    assert wrong and all(c.settings["rows"] == 8 and not c.seconds and c.reason == reason for c in wrong)
    found = search(norm, tools(lambda *_: [1.0], why_wrong=lambda *_: "bad"), 1.0)
    assert found.winner is None and "NOT TUNED, the default is wrong: bad" in found.text()


def found_of(this: Target, seconds: dict[int, float]) -> Found:
    return search(this, tools(lambda _, s: [seconds.get(s["num_warps"], 1.0)] * 5), 1.0)


def table(path: Path, *records: dict[str, Any], device: str = tables.INTERPRETER) -> Path:
    path.write_text(json.dumps({"format": 1, "device": device, "at": path.name, "records": records}))
    return path


def test_a_record_is_what_a_table_holds(norm: Target, tmp_path: Path) -> None:
    record = found_of(norm, {8: 0.5}).record(floor_bytes=10**9, copy_rate=4e9)
    assert record["config"]["num_warps"] == 8 and (record["GB_per_s"], record["of_copy"]) == (2.0, 0.5)
    assert record["default_median_s"] == 1.0 and len(record["candidates"]) == 1 + len(candidates(norm))
    assert record["timed_in"]["case"] == "layer_norm_forward" and record["timed_in"]["hidden"] == 64
    read = tables.read_table(table(tmp_path / "a.json", record))
    assert read.settings == {norm.key: record["config"]}


def test_merge_and_check(norm: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (found_of(norm, {warps: 0.5}).record(1, 1.0) for warps in (2, 8))
    other = found_of(target("layer_norm_forward", 256), {}).record(1, 1.0) | {"source": "old"}
    a, b = table(tmp_path / "a.json", slow), table(tmp_path / "b.json", fast, other)
    assert main(["tune", "--check", str(a)]) == 0 and main(["tune", "--check", str(a), str(b)]) == 1
    assert "b.json: 1 records are of other versions" in capsys.readouterr().out
    out = tmp_path / "out.json"
    assert main(["tune", "--merge", str(a), str(b), "--out", str(out)]) == 0
    assert f"{b} replaces the record of {norm}" in capsys.readouterr().out
    assert list(tables.read_table(out).settings.values()) == [fast["config"]]
    assert json.loads(out.read_text())["at"] == "b.json"
    elsewhere = table(tmp_path / "c.json", slow, device="NVIDIA H200")
    for argv, message in (
        (["--merge", a, b], "--out must be a new file"),
        (["--merge", a, b, "--out", out], "must be a new file"),
        (["--merge", a, elsewhere, "--out", tmp_path / "d.json"], "must have tables of one device"),
        (["--check", tmp_path / "none.json"], r"--check: .*none\.json must be a table"),
        (["--check", a, "--dry-run"], r"--dry-run \(True\) has no effect with --check"),
        (["--check", a, "--model", "x"], "--model has no effect with --check"),
    ):
        with pytest.raises(ConfigError, match=message):
            tune.main([str(word) for word in argv])
    assert not (tmp_path / "d.json").exists()


def test_a_table_is_written_whole_and_to_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the command but the GPU, in whose place is a machine on which more warps are faster."""

    @contextlib.contextmanager
    def machine(device: torch.device) -> Iterator[Machine]:
        header = {"format": 1, "device": "NVIDIA H200"}
        yield Machine(tools(lambda _, s: [1e-3 / s["num_warps"]] * 5), 90, 4e12, header)

    monkeypatch.setattr(tuning_machine, "gpu_machine", machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.chdir(tmp_path)
    argv = ["tune", "--op", "adamw", "--shape", "rows=64,hidden=64"]
    assert main(argv) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("default num_warps=4 right; 5 candidates: 5 right; num_warps=32 is 8.00× as fast")
    assert printed[1] == "wrote NVIDIA_H200.json: 1 records. Train with --kernel-table NVIDIA_H200.json"
    read = tables.read_table(Path("NVIDIA_H200.json"))
    assert (read.device, list(read.settings.values())) == ("NVIDIA H200", [{"num_warps": 32}])
    assert main(argv) == 2 and "--out (NVIDIA_H200.json) must be a new file; there is one." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["NVIDIA_H200.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "must have an NVIDIA GPU .* Use --dry-run"),
        (["--dry-run", "--out", "x.json"], r"--out \(x.json\) needs times"),
        (["--dry-run", "--op", "matmul"], r"--op \(matmul\) must be one of layer_norm_forward"),
        (["--dry-run", "--shape", "rows=8"], r"--shape \(rows=8\) must hold rows and hidden"),
        (["--dry-run", "--shape", "rows=8,hidden=4"], "rows that are a positive multiple of 16"),
        (["--dry-run", "--dtype", "float16", "--model", "x"], r"--dtype \(float16\) and --model exclude"),
        (["--dry-run", "--op", "long_softmax_forward", "--shape", "rows=16,hidden=64"], "none is. Leave --shape out"),
    ],
)
def test_what_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune.main(argv)


def test_shapes_of_a_model(corpus: Path) -> None:
    """Of one rank of two: half of the heads, of the MLP and of the words, half of the sequence between them."""
    flags = tiny_flags(corpus, tensor_model_parallel_size=2, sequence_parallel=True, world_size=2, bf16=True,
                       hidden_size=64, seq_length=64, max_position_embeddings=64)  # fmt: skip
    works, notes = tuning_works.of_model(flags)
    assert {(work.group, work.rows, work.hidden) for work in works} == {
        *((name, 64, 64) for name in ("norm_cases", "add_norm_cases", "dropout_cases")),
        ("gelu_cases", 128, 128), ("cross_entropy_cases", 128, 112), ("flash_cases", 64, 32),
        ("optimizer_cases", 1, works[-1].hidden),
    }  # fmt: skip
    assert {work.dtype for work in works} == {"bfloat16"} and works[-2].head_size == 16
    assert works[-1].hidden == pytest.approx(119_000 / 2, rel=0.1) and notes == []
    works, _ = tuning_works.of_model(tiny_flags(corpus, attention_backend="softmax"))
    assert ("softmax_cases", 4 * 32, 16) in {(work.group, work.rows, work.hidden) for work in works}


def test_a_dry_run_from_end_to_end(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, "-m", "trimegatron", "tune", "--dry-run", "--op", "adamw", "--shape", "rows=64,hidden=64"],
        cwd=tmp_path, env=environment, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = done.stdout.splitlines()
    assert first.startswith("adamw float32: default num_warps=4 right; 5 candidates: ")
    right = int(first.split("candidates: ")[1].partition(" right")[0].rpartition(" ")[2])
    assert right >= 1 and "wrong" not in first
    assert last == "dry run: no time was measured, so nothing is decided and nothing written"
    assert [path.name for path in tmp_path.iterdir()] == ["triton"]


def test_the_driver_is_read(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (a@b)\nGCC 12\n"
    )
    assert driver_version(path) == "580.82.07" and driver_version(tmp_path / "none") is None
