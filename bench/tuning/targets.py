"""What is tuned: each kernel that cases launch, at each shape bucket they meet; and what to try for it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from trimegatron.bench import aot, kernel_cases
from trimegatron.bench.case import Case, Shapes, check
from trimegatron.kernels import launcher
from trimegatron.kernels.configs import TUNED_OPS, Config, Key, bucket, key_of, key_text
from trimegatron.kernels.tables import MOST

Settings = dict[str, int]
"""Fields of a ``Config`` that a table may set for one op."""

_FARTHEST = 3  # steps, each a factor of two or one stage, away from the heuristic
_THREAD_ELEMENTS = (1, 128)  # of a tile


@dataclasses.dataclass(frozen=True)
class Work:
    """One group of cases at one shape; ``hidden`` is the last dimension, whatever the group calls it."""

    group: str
    rows: int
    hidden: int
    dtype: str
    head_size: int | None = None

    def cases(self, device: str | torch.device) -> Iterator[Case]:
        group = getattr(kernel_cases, self.group)
        sizes = {} if self.head_size is None else {"head_size": self.head_size}
        return group(Shapes(self.rows, self.hidden, getattr(torch, self.dtype), torch.device(device)), **sizes)

    def case(self, name: str, device: str | torch.device) -> Case:
        return next(case for case in self.cases(device) if case.name == name)

    def checked_at(self) -> list[Work]:
        """Where results are compared: the same row length at few rows, and one that no tile fits, of the same bucket.
        Rows of attention are as many as it takes to walk over whole tiles."""
        if self.group == "optimizer_cases":
            return [dataclasses.replace(self, rows=1, hidden=min(self.hidden, 100_000))]
        if self.group == "flash_cases":
            size = self.head_size or 64
            small = [Work(self.group, 272, size, self.dtype, size)]
            small.append(dataclasses.replace(small[0], rows=80, hidden=size - 1, head_size=size - 1))
        else:
            small = [dataclasses.replace(self, rows=48 if self.hidden <= 16384 else 16)]
            small.append(dataclasses.replace(small[0], hidden=self.hidden - 1))
        return [work for work in small if bucket(work.hidden) == bucket(small[0].hidden)]


@dataclasses.dataclass(frozen=True)
class Target:
    """One record to make: a kernel at a shape bucket, with the case that it is timed in."""

    key: Key
    heuristic: Config
    work: Work
    case: str

    @property
    def default(self) -> Settings:
        """The heuristic's."""
        return {name: getattr(self.heuristic, name) for name in TUNED_OPS[self.key[0]].parameters}

    def __str__(self) -> str:
        return key_text(self.key)


@contextmanager
def forced(key: Key | None, settings: Settings, asked: dict[Key, Config] | None = None) -> Iterator[None]:
    """Kernels go by their heuristics, that of ``key`` by ``settings``; ``asked`` receives the heuristics in use."""

    def configure(op: str, heuristic: Config, x: torch.Tensor, **shape: int) -> Config:
        this = key_of(op, str(x.dtype).removeprefix("torch."), shape)
        if asked is not None:
            asked[this] = heuristic
        return dataclasses.replace(heuristic, **settings) if this == key else heuristic

    with mock.patch.object(launcher, "configure", configure):
        yield


def compiled_for(arch: int) -> Any:
    """Heuristics are those of compute capability ``arch`` on every device."""
    return mock.patch.object(launcher, "architecture", lambda device: arch)


def targets(works: Iterable[Work], ops: Collection[str], arch: int) -> list[Target]:
    """One for each of ``ops`` at each bucket, with the first case that meets it."""
    found: dict[Key, Target] = {}
    for work in works:
        for case in work.cases("meta"):
            asked: dict[Key, Config] = {}
            with forced(None, {}, asked), compiled_for(arch):
                aot.record(partial(case.kernel, *case.inputs()))
            for key, heuristic in asked.items():
                if key[0] in ops:
                    found.setdefault(key, Target(key, heuristic, work, case.name))
    return list(found.values())


def candidates(target: Target) -> list[Settings]:
    """Settings around the heuristic, the nearest first; not the heuristic itself."""
    op, near = TUNED_OPS[target.key[0]], range(-_FARTHEST, _FARTHEST + 1)
    ranges = []
    for name, value in target.default.items():
        if name == "num_stages":
            ranges.append([(abs(step), name, value + step) for step in near if 1 <= value + step <= 5])
        else:
            least = op.least_columns if name == "columns" else 1
            sizes = [(abs(step), name, int(value * 2.0**step)) for step in near if value * 2.0**step >= least]
            ranges.append([x for x in sizes if x[2] <= MOST[name]])
    found = []
    for choice in itertools.product(*ranges):
        distance, settings = sum(step for step, *_ in choice), {name: value for _, name, value in choice}
        config = dataclasses.replace(target.heuristic, **settings)
        elements = config.rows * config.columns / (32 * config.num_warps)
        if 0 < distance <= _FARTHEST and _THREAD_ELEMENTS[0] <= elements <= _THREAD_ELEMENTS[1]:
            found.append((distance, settings))
    return [settings for _, settings in sorted(found, key=lambda x: x[0])]


def compiled(target: Target, settings: Settings, arch: int) -> aot.Code:
    """The target's kernel with ``settings``, as compiled ahead of time."""
    case = target.work.case(target.case, "meta")
    with forced(target.key, settings), compiled_for(arch):
        launches = aot.record(partial(case.kernel, *case.inputs()))
    name = TUNED_OPS[target.key[0]].kernel
    return aot.measure(next(launch for launch in launches if launch.kernel.__name__ == name), arch)


def wide_share(widths: Counter[int]) -> float:
    """Of the bytes that instructions move, those that move 16 at a time."""
    total = sum(bits * count for bits, count in widths.items())
    return 128 * widths.get(128, 0) / total if total else 1.0


def unfit(code: aot.Code, default: aot.Code, shared_limit: int) -> str | None:
    """Why the compiled kernel is not worth a try, or None."""
    if code.spill_bytes > default.spill_bytes:
        return f"spills {code.spill_bytes} B a thread"
    if code.shared_bytes > shared_limit:
        return f"takes {code.shared_bytes} B of shared memory, there are {shared_limit}"
    if wide_share(code.loads + code.async_loads) < 0.5 <= wide_share(default.loads + default.async_loads):
        return "loses 128-bit loads"
    if wide_share(code.stores) < 0.5 <= wide_share(default.stores):
        return "loses 128-bit stores"
    return None


def why_wrong(key: Key, case_name: str, works: Iterable[Work], settings: Settings, device: torch.device) -> str | None:
    """How the results of the case with ``settings`` differ from the eager reference's, or what stops them; None where
    they are right."""
    for work in works:
        asked: dict[Key, Config] = {}
        case = work.case(case_name, device)
        try:
            with forced(key, settings, asked):
                check(case)
        except Exception as error:  # whatever it is, settings with which the kernel does not run are none
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        assert key in asked, f"{case_name} at {case.shape} does not ask for {key_text(key)}"
    return None


def settings_text(settings: Settings) -> str:
    """As in "rows=1 num_warps=8"."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
