"""The benchmark of a training step: what computes something else is not timed, and what is reported is what ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trimegatron.bench import cli, rounds, step, trace, variants
from trimegatron.bench.results import Result, read_run
from trimegatron.errors import ConfigError, UserError
from trimegatron.metrics import peak_flops


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def walk(tmp_path: Path, *argv: str) -> dict[tuple[str, str], Result]:
    out = tmp_path / "step.json"
    assert cli.main(["step", "--dry-run", "--threads", "1", "--out", str(out), *argv]) == 0
    return {(case.variant, case.figure): case for case in read_run(out).cases}


def test_all_variants_compute_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = walk(tmp_path, "--config", "tiny", "--variants", *step.VARIANTS)
    printed = capsys.readouterr().out
    assert "first 3 losses agree within 2e-05" in printed and "the peak is unknown" in printed
    assert {variant for variant, _ in found} == set(step.VARIANTS)
    assert len(found["trimegatron", "time"].values) == 2 and "a step of transformers takes " in printed
    for name in step.VARIANTS:
        # What lives from step to step: weights and two moments, ours with its gradients, in fp32.
        state = 4 * (4 if name.startswith("trimegatron") else 3) * 110_000
        assert state < found[name, "peak memory"].values[0] < 3 * state, name
        parts = sum(found[name, f"time of {part}"].values[0] for part in ("forward", "backward", "optimizer"))
        assert parts == pytest.approx(found[name, "time"].values[0])
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{name:36}"))
        calls, launches = line.split()[-2:]
        assert (calls == "–") == name.endswith("compiled") and launches == "–"


def test_half_precision_with_dropout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["trimegatron", "trimegatron references", "transformers"]
    found = walk(tmp_path, "--config", "gpt2-xl", "--dropout", "0.1", "--variants", *names)
    printed = capsys.readouterr().out
    assert "dry run of gpt2-xl" in printed and "(where dropout masks differ, within 0.05)" in printed
    assert found["trimegatron", "time"].parameters["dtype"] == "bfloat16"


def test_what_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = variants.transformers

    def wrong(*args: object, **rest: object) -> variants.Variant:
        variant = right(*args, **rest)  # type: ignore[arg-type]
        return dataclasses.replace(variant, forward=lambda: variant.forward() * 1.0001)

    monkeypatch.setattr(variants, "transformers", wrong)
    monkeypatch.setattr(rounds, "take_turn", lambda *_: pytest.fail("timed"))
    with pytest.raises(UserError, match="the losses differ by more than 2e-05, so nothing is timed"):
        walk(tmp_path, "--variants", "trimegatron", "transformers")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("losses", "drops"), [([1.0, float("nan")], False), ([1.0, 1.2], True)])
def test_losses_that_are_no_numbers_or_of_another_model(losses: list[float], drops: bool) -> None:
    contenders = {
        masks: rounds.Contender(
            variants.Variant(lambda: torch.zeros(()), lambda: None, list, masks=masks), [loss], 0.0, 0
        )
        for masks, loss in zip("ab", losses, strict=True)
    }
    with pytest.raises(UserError, match="the losses differ"):
        rounds.compare_losses(contenders, dtype=torch.float32, drops=drops)


def test_what_the_memory_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    def too_large() -> variants.Variant:
        raise torch.OutOfMemoryError

    def small() -> variants.Variant:
        return variants.Variant(lambda: torch.ones((), requires_grad=True) * 2, lambda: None, list, masks="torch")

    device = torch.device("cpu")
    contenders = rounds.start({"large": too_large, "small": small}, device=device)
    assert list(contenders) == ["small"] and "does not hold it beside the others: large" in capsys.readouterr().out
    assert contenders["small"].losses == [2.0] * rounds.COMPARED_STEPS
    assert rounds.take_turns(contenders, device=device, rounds=2, steps=2) == 2 == len(contenders["small"].turns)
    assert rounds.take_turns(contenders, device=device, rounds=2, steps=2, deadline=0.0) == 0
    contenders["small"].variant = dataclasses.replace(small(), forward=too_large)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not hold a step of small beside what the others keep"):
        rounds.take_turns(contenders, device=device, rounds=1, steps=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "huge"], r"--config \(huge\) must be a YAML file or one of tiny, small, codeparrot-small"),
        (["--variants", "transformers"], "must have trimegatron among them"),
        (["--hidden-size", "10", "--num-attention-heads", "3"], "must be a multiple of --num-attention-heads"),
        (["--dropout", "1"], "must be below 1"),
    ],
)
def test_wrong_options(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.main(["step", *argv])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["codeparrot-small", "gpt2-medium", "gpt2-xl"])
def test_no_gpu_is_said(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--device \(cuda\) must be there, and torch finds no GPU.*--dry-run"):
        cli.main(["step", "--config", name])


def test_a_trace_is_read() -> None:
    """Three kernels, two of them at the same time, in 10 µs of which 4 are idle; host events do not count."""

    def event(name: str, ts: float, dur: float, cat: str = "kernel") -> trace.Event:
        return {"name": name, "cat": cat, "ph": "X", "ts": ts, "dur": dur}

    events = [event("b", 107.0, 3.0), event("a", 100.0, 2.0), event("a", 101.0, 2.0), event("op", 0.0, 9.0, "cpu_op"),
              {"name": "c", "ph": "i", "cat": "kernel", "ts": 1.0}]  # fmt: skip
    found = trace.read(events, "cuda")
    assert found.launches == 3 and found.idle_share == pytest.approx(0.4)
    assert [name for name, *_ in found.longest] == ["a", "b"]
    assert [(number, round(1e6 * seconds, 6)) for _, number, seconds in found.longest] == [(2, 4.0), (1, 3.0)]
    assert trace.read([], "cuda") == trace.Trace(0, 0.0, [])


def test_peaks_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Tesla T4", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak
