"""The kernels' benchmark, which needs no device."""

from __future__ import annotations

import pytest
import torch

from trimegatron.bench import aot, cli, kernel_cases
from trimegatron.bench.case import Shapes
from trimegatron.bench.closeness import close
from trimegatron.bench.traffic import moved_bytes
from trimegatron.errors import ConfigError


def test_every_op_moves_what_the_table_says() -> None:
    """The bytes of all its launches at 8192 tokens, beside the least: partial sums, statistics and vectors are all
    there is on top."""
    for hidden in (1024, 4096):
        for case in kernel_cases.cases(8192, hidden, torch.bfloat16, "meta"):
            inputs = case.inputs()
            moved = moved_bytes(aot.record(lambda case=case, inputs=inputs: case.kernel(*inputs)))
            most = 1.53 if case.name == "flash_attention_backward" else 1.06  # both its kernels read q, k, v and dout
            assert case.floor <= moved < most * case.floor, (case.name, case.shape, moved / case.floor)
    for case in kernel_cases.optimizer_cases(Shapes(1, 1 << 20, torch.bfloat16, torch.device("meta"))):
        inputs = case.inputs()
        moved = moved_bytes(aot.record(lambda case=case, inputs=inputs: case.kernel(*inputs)))
        assert case.floor <= moved < 1.01 * case.floor, (case.name, moved / case.floor)


def test_a_multiprocessor_holds_what_fits() -> None:
    """Against CUDA's occupancy calculator: 40 registers and 8 warps leave room for 6 programs, 103 and 16 for 1,
    shared memory for 3 of 64 KB."""
    codes = ((8, 1, 40, 0, 0), (16, 1, 103, 0, 0), (4, 1, 32, 0, 64 << 10))
    assert [aot.Code(90, *code).programs for code in codes] == [6, 1, 3]
    assert aot.Code(90, 8, 1, 40, 0, 0).occupancy == 0.75


def test_wrong_results_are_found() -> None:
    with pytest.raises(AssertionError, match=r"^x: .*"):
        close(torch.ones(3), torch.tensor([1.0, 1.0, 1.001]), 1e-5, "x")
    with pytest.raises(AssertionError, match="x"):
        close(torch.ones(3), torch.full((3,), float("nan")), 1e-5, "x")


def test_compiled_figures_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "GROUPS", (kernel_cases.norm_cases,))
    from trimegatron.bench import kernels

    monkeypatch.setattr(kernels, "best_time", lambda call, **_: (call(), 1.0)[1])
    assert cli.main(["kernels", "--hidden", "128", "--rows", "256"]) == 0
    printed = capsys.readouterr().out
    assert "none of their times is measured" in printed and "launcher 1.00, static 1.00, dispatch 1.00" in printed
    (row,) = (line.split() for line in printed.splitlines() if line.startswith("layer_norm_forward"))
    assert float(row[4]) >= 1.0 and int(row[6]) == 0
    with pytest.raises(ConfigError, match="--rows"):
        cli.main(["kernels", "--rows", "17"])
