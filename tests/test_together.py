"""Long work on every rank: nobody waits in a collective, and an error of one is an error of all, soon."""

from __future__ import annotations

import time

import pytest

from tests.parallel import run_ranks
from trimegatron import together
from trimegatron.errors import DataError
from trimegatron.mesh import Mesh, close_mesh, init_mesh, select_device
from trimegatron.together import on_every_rank


def _slow_rank() -> tuple[float, list[str]]:
    """Rank 1 works five times as long as any collective may take."""
    mesh = init_mesh(select_device("cpu"), timeout_minutes=1 / 60)
    rank, lines = mesh.world.rank, []

    def work() -> int:
        time.sleep(5 if rank == 1 else 0)
        return rank

    together.REMIND_SECONDS = 1.0
    result = on_every_rank(mesh, work, what="test", say=lines.append)
    assert result == rank
    started = time.monotonic()
    mesh.barrier()
    assert time.monotonic() - started < 1
    close_mesh()
    return rank, lines


def test_a_slow_rank_is_waited_for_beyond_the_collectives_timeout() -> None:
    (_, lines), (_, none) = run_ranks(2, _slow_rank)
    assert lines[0] == "test: waiting for rank 1 since 1 s"
    assert none == []


def _first_goes_at_once() -> float:
    """Rank 0, which holds the store, is gone right after the work, as when the very next thing fails there."""
    mesh = init_mesh(select_device("cpu"))
    together.POLL_SECONDS = 0.01 if mesh.world.rank == 0 else 1.0  # the others sleep when it is done
    on_every_rank(mesh, lambda: time.sleep(0.3 if mesh.world.rank == 0 else 0), what="test", say=print)
    close_mesh()
    return float(mesh.world.rank)


def test_the_rank_that_holds_the_store_goes_last() -> None:
    assert run_ranks(3, _first_goes_at_once) == [0.0, 1.0, 2.0]


def _failing_rank(failing: list[int]) -> tuple[str, float]:
    mesh = init_mesh(select_device("cpu"))
    started = time.monotonic()

    def work() -> None:
        if mesh.world.rank in failing:
            raise DataError("folder: read-only")
        time.sleep(60)

    try:
        on_every_rank(mesh, work, what="test", say=print)
    except DataError as error:
        return str(error), time.monotonic() - started
    finally:
        close_mesh()
    return "", 0.0


@pytest.mark.parametrize("failing", [[0], [2], [0, 1, 2]])
def test_one_error_is_everybodys_within_seconds(failing: list[int]) -> None:
    for message, seconds in run_ranks(3, _failing_rank, failing):
        assert message == "folder: read-only"
        assert seconds < 5


def _unexpected() -> str:
    mesh = init_mesh(select_device("cpu"))
    try:
        on_every_rank(mesh, lambda: 1 // mesh.world.rank, what="test", say=print)
    except (DataError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close_mesh()
    return ""


def test_an_error_nobody_foresaw_names_its_rank() -> None:
    mine, theirs = run_ranks(2, _unexpected)
    assert mine.startswith("ZeroDivisionError")
    assert theirs.startswith("DataError: test: rank 0: ZeroDivisionError")


def test_alone_it_is_just_the_work() -> None:
    assert on_every_rank(Mesh(select_device("cpu")), lambda: 7, what="test", say=print) == 7
