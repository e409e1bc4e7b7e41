"""The launcher that skips Triton's dispatch hands the driver what Triton's would, with Triton's compiler and a stub in
the driver's place."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton

from trimegatron.bench import aot, kernel_cases
from trimegatron.bench.case import Shapes
from trimegatron.bench.kernels import launch_cost
from trimegatron.bench.stub_driver import STREAM, StubDriver
from trimegatron.kernels import bias_dropout_add, static_launch
from trimegatron.kernels.launcher import Config
from trimegatron.kernels.static_launch import StaticLaunch, ordinary_launch

CONFIG = Config(8, 128, 4)
FLAGS = {"HIDDEN": 128, "HAS_BIAS": True, "HAS_RESIDUAL": True, "DROPOUT": True, "ROWS": 8, "COLUMNS": 128}
KERNEL = bias_dropout_add._forward_kernel


@pytest.fixture
def driver(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    stub = StubDriver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "current_device", stub.get_current_device)
    KERNEL.device_caches.clear()
    monkeypatch.setattr(triton.runtime.driver, "_active", stub)
    yield stub
    KERNEL.device_caches.clear()
    gc.collect()  # compiled kernels ask the driver to unload them, so while there is one


def arguments(rows: int = 64, dtype: torch.dtype = torch.float16, offset: int = 0, seed: int = 5) -> tuple[Any, ...]:
    x = torch.zeros(rows * 128 + offset, dtype=dtype)[offset:]
    samples = torch.zeros(8, dtype=torch.int64)
    return x, x, x, x, samples, rows, 8, seed, 3 << 14, 0, 6554, 1.1


def test_the_driver_gets_what_triton_would_hand_it(driver: StubDriver) -> None:
    """For every kind twice: the first launch of one compiles, the second is the static one. A kind is told from all
    others by dtype, alignment, a dimension that is 1 or a multiple of 16, a missing argument, a constant, a stage."""
    aligned = arguments()
    kinds = [
        (aligned, CONFIG, FLAGS),
        (arguments(dtype=torch.float32), CONFIG, FLAGS),
        (arguments(offset=1), CONFIG, FLAGS),
        (arguments(rows=1), CONFIG, FLAGS),
        (arguments(rows=63), CONFIG, FLAGS),
        ((aligned[0], None, *aligned[2:]), CONFIG, FLAGS | {"HAS_BIAS": False}),
        (aligned, Config(8, 128, 2), FLAGS),
    ]
    static = StaticLaunch(KERNEL)
    for args, config, flags in kinds:
        ordinary_launch(KERNEL, (3, 2), args, config, flags)
        for _ in range(2):
            static(0, (3, 2), args, config, flags)
        expected, first, second = driver.launches[-3:]
        assert first[1][:6] == expected[1][:6] and first[1][9:] == expected[1][9:]
        name, (x, y, z, stream, function, metadata, *hooks) = second
        assert (name, x, y, z, stream) == (expected[0], 3, 2, 1, STREAM)
        assert (function, metadata) == expected[1][4:6]
        assert hooks[:3] == [None, None, None]
        assert len(hooks[3:]) == len(KERNEL.arg_names) and hooks[3:] == list(expected[1][9:])
    assert len(static._prepared) == len(kinds)


def test_dispatch_is_left_out_from_the_second_launch_on(driver: StubDriver) -> None:
    """Also when seed, layer and grid have changed. Python functions entered: ours, the key's, and three of the stub."""
    static = StaticLaunch(KERNEL)
    static(0, (3,), arguments(), CONFIG, FLAGS)
    args = arguments(seed=-6)
    entered = []
    sys.setprofile(lambda frame, event, arg: entered.append(frame.f_code.co_qualname) if event == "call" else None)
    static(0, (4,), args, CONFIG, FLAGS)
    sys.setprofile(None)
    assert len(driver.launches) == 2 and driver.launches[1][1][0] == 4
    assert len(entered) == 5, entered


def test_a_launch_costs_a_small_part_of_triton_s_dispatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What either adds to the compiled kernel's own launcher, in host time: some 2 µs of 14."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cost = {name: min(times) for name, times in launch_cost().items()}
    assert cost["launcher"] < cost["static"] < cost["launcher"] + 0.2 * (cost["dispatch"] - cost["launcher"]), cost


@pytest.mark.parametrize("op", ["cross_entropy_both", "adamw", "masked_softmax_forward"])
def test_a_launch_finds_what_was_compiled_ahead_of_time(
    op: str, driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With arguments that are missing, 1, multiples of 16, not to specialise on, and floats. Of the cross entropy the
    rows are so short that a tile holds several."""
    shapes = Shapes(64, 64, torch.bfloat16, torch.device("meta"))
    cases = [*kernel_cases.cases(64, 64, torch.bfloat16, "meta"), *kernel_cases.optimizer_cases(shapes)]
    case = next(case for case in cases if case.name == op)
    (launch, *_) = aot.record(lambda: case.kernel(*case.inputs()))
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(aot.source(launch), target=driver.get_current_target(), options=options)
    args = [torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in launch.args]
    monkeypatch.setattr(launch.kernel, "device_caches", launch.kernel.device_caches.copy())
    launch.kernel.device_caches.clear()
    found = ordinary_launch(launch.kernel, launch.grid, tuple(args), launch.config, launch.constexprs)
    assert found.hash == compiled.hash
    launch.kernel.device_caches.clear()


def test_constants_may_come_in_any_order(driver: StubDriver) -> None:
    static = StaticLaunch(KERNEL)
    for flags in (FLAGS, dict(reversed(FLAGS.items())), dict(reversed(FLAGS.items()))):
        static(0, (3,), arguments(), CONFIG, flags)
    assert [launch[1][-len(FLAGS) :] for launch in driver.launches] == [tuple(FLAGS.values())] * 3


def test_a_launch_on_another_device_makes_it_current(driver: StubDriver) -> None:
    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, driver.current = driver.current, index
        yield
        driver.current = before

    static = StaticLaunch(KERNEL)
    seen = []
    for index in (0, 1, 1, 0):
        with mock.patch.object(torch.cuda, "device", device):
            static(index, (3,), arguments(), CONFIG, FLAGS)
        seen.append((driver.launches[-1][1][3], driver.launches[-1][1][4], driver.current))
    functions = [hash((driver.launches[0][0], index)) for index in (0, 1)]
    assert seen == [(STREAM + index, functions[index], 0) for index in (0, 1, 1, 0)]


def test_launch_hooks_see_every_launch(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    static, calls = StaticLaunch(KERNEL), []
    static(0, (3,), arguments(), CONFIG, FLAGS)
    chain = triton.knobs.HookChain()
    chain.add(calls.append)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
    static(0, (3,), arguments(), CONFIG, FLAGS)
    assert driver.launches[-1][1][7] is chain  # the driver calls it


def test_a_missing_internal_is_said_once_and_launches_go_on(
    driver: StubDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_launch, "_reasons_given", set())
    launched = []

    def bare(*args: Any) -> object:
        launched.append(args)
        return object()

    monkeypatch.setattr(static_launch, "ordinary_launch", bare)
    static = StaticLaunch(KERNEL)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            static(0, (3,), arguments(), CONFIG, FLAGS)
    assert len(launched) == 3
    assert [record.getMessage().count("has no run") for record in caplog.records] == [1]


def test_the_kinds_kept_are_bounded(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_launch, "_MOST_KINDS", 2)
    static = StaticLaunch(KERNEL)
    for rows in (16, 32, 48, 64):
        static(0, (rows,), arguments(rows), CONFIG, FLAGS)
        assert 1 <= len(static._prepared) <= 2
