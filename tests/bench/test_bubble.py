"""The bubble of each schedule, by its own order of passes, is the papers' formula."""

from __future__ import annotations

import itertools

import pytest

from trimegatron.bench import bubble
from trimegatron.errors import ConfigError
from trimegatron.pipeline_parallel.engine import action_order


@pytest.mark.parametrize("backward_time", [1.0, 2.0])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), list(itertools.product((2, 4, 8), (8, 16))))
def test_formula(num_ranks: int, num_micro_batches: int, backward_time: float):
    for schedule, num_chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        measured = bubble.measure(schedule, num_ranks, num_chunks, num_micro_batches, backward_time)
        assert measured.formula == (num_ranks - 1) / (num_micro_batches * num_chunks)
        assert measured.simulated == pytest.approx(measured.formula, rel=1e-12), schedule


def test_the_simulation_waits():
    """Two ranks, one micro-batch: nothing overlaps. And an order nobody can run is seen."""
    order = action_order("1f1b", num_ranks=2, num_chunks=1, num_micro_batches=2)
    assert order[1] == [("forward", 1, 0), ("backward", 1, 0), ("forward", 1, 1), ("backward", 1, 1)]
    alone = [[("forward", 0, 0), ("backward", 0, 0)], [("forward", 1, 0), ("backward", 1, 0)]]
    times = {"forward": 1.0, "backward": 2.0}
    assert bubble.makespan(alone, times, num_stages=2) == 6.0
    with pytest.raises(AssertionError, match="deadlock"):
        bubble.makespan([alone[0][::-1], alone[1]], times, num_stages=2)


def test_report(capsys: pytest.CaptureFixture[str]):
    assert bubble.main(["--ranks", "2", "--micro-batches", "4", "--backward-time", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["gpipe", "1f1b", "interleaved"]
    assert all(line.endswith("1.000") for line in lines[1:])
    with pytest.raises(ConfigError, match=r"--micro-batches \(6\) must be a multiple of --ranks \(4\)"):
        bubble.main(["--ranks", "4", "--micro-batches", "6"])
