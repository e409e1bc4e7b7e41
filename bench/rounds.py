"""Variants of a step beside each other: their losses compared, then timed in turns, round after round.

A turn is a few steps of one variant, of which the first is not timed; a round is a turn of each. So a noisy minute
meets all of them, and each round gives a ratio of its own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch

from trimegatron.bench.clock import Clock
from trimegatron.bench.variants import Variant
from trimegatron.errors import UserError

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3}
"""How far losses of the first steps may lie apart, relatively, where they are of the same function."""
OTHER_MASKS = 0.05
"""The same where dropout masks differ: enough to find another model, not to find a small mistake."""
COMPARED_STEPS = 3


@dataclass(frozen=True)
class Turn:
    """Medians of one turn: seconds of a step and of its parts."""

    step: float
    forward: float
    backward: float
    optimizer: float


@dataclass
class Contender:
    """A variant that has made its first steps, and what was seen of it."""

    variant: Variant
    losses: list[float]
    first_step: float
    """Seconds, with what is compiled then."""
    resident: int
    """Bytes on the GPU between steps; 0 on a CPU."""
    peak: int = 0
    """Bytes on the GPU, at most, of this variant alone; 0 on a CPU."""
    turns: list[Turn] = field(default_factory=list)

    def medians(self, part: str = "step") -> list[float]:
        return [getattr(turn, part) for turn in self.turns]


Contenders = dict[str, Contender]


def start(
    makers: Mapping[str, Callable[[], Variant]], *, device: torch.device, say: Callable[[str], None] = print
) -> Contenders:
    """Build each and make its first steps. One that the GPU's memory cannot hold beside the others is left out, with a
    line."""
    contenders: Contenders = {}
    for name, make in makers.items():
        try:
            contenders[name] = start_one(make, device)
        except torch.OutOfMemoryError:
            say(f"left out, the GPU's memory does not hold it beside the others: {name}")
        if name not in contenders:  # only now is nothing held by the error
            gc.collect()
            torch.cuda.empty_cache()
    return contenders


def start_one(make: Callable[[], Variant], device: torch.device) -> Contender:
    before = allocated(device)
    variant = make()
    started = time.perf_counter()
    losses = [variant.step().item()]
    first_step = time.perf_counter() - started
    losses += [variant.step().item() for _ in range(COMPARED_STEPS - 1)]
    return Contender(variant, losses, first_step, allocated(device) - before)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def compare_losses(contenders: Contenders, *, dtype: torch.dtype, drops: bool) -> str:
    """Refuse to time what does not compute the same. Returns a line that says what agreed.

    Raises:
        UserError: the losses.
    """
    shown = "; ".join(
        f"{name} " + ", ".join(f"{loss:.6f}" for loss in contender.losses) for name, contender in contenders.items()
    )
    groups: dict[str, list[list[float]]] = {}
    for contender in contenders.values():
        groups.setdefault(contender.variant.masks if drops else "all", []).append(contender.losses)
    checks = [(losses, TOLERANCE[dtype]) for losses in groups.values()]
    checks.append(([contender.losses for contender in contenders.values()], OTHER_MASKS))
    for losses, tolerance in checks:
        for of_one_step in zip(*losses, strict=True):
            # NaN is near nothing.
            if not all(abs(loss - of_one_step[0]) <= tolerance * abs(of_one_step[0]) for loss in of_one_step):
                raise UserError(f"the losses differ by more than {tolerance:g}, so nothing is timed: {shown}")
    other = f" (where dropout masks differ, within {OTHER_MASKS:g})" if len(groups) > 1 else ""
    return f"first {COMPARED_STEPS} losses agree within {TOLERANCE[dtype]:g}{other}: {shown}"


def take_turns(
    contenders: Contenders, *, device: torch.device, rounds: int, steps: int, deadline: float = float("inf")
) -> int:
    """Fill in ``turns`` and, on a GPU, ``peak``. No round begins after ``deadline`` (``time.monotonic``). Returns how
    many there were.

    Raises:
        UserError: the GPU's memory does not hold a step beside what the other variants keep.
    """
    for done in range(rounds):
        if time.monotonic() > deadline:
            return done
        for name, contender in contenders.items():
            before = allocated(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            try:
                contender.turns.append(take_turn(contender.variant, Clock(device), steps))
            except torch.OutOfMemoryError:
                raise UserError(
                    f"the GPU's memory does not hold a step of {name} beside what the others keep. Give a smaller "
                    "--micro-batch-size or fewer --variants"
                ) from None
            if device.type == "cuda":
                own = torch.cuda.max_memory_allocated(device) - before + contender.resident
                contender.peak = max(contender.peak, own)
    return rounds


def take_turn(variant: Variant, clock: Clock, steps: int) -> Turn:
    """``steps`` steps, all but the first timed."""
    variant.step()
    clock.wait()
    marks = []
    for _ in range(steps - 1):
        marks.append([clock.mark()])
        loss = variant.forward()
        marks[-1].append(clock.mark())
        loss.backward()
        marks[-1].append(clock.mark())
        variant.update()
        marks[-1].append(clock.mark())
        del loss
    clock.wait()
    between = {"step": (0, 3), "forward": (0, 1), "backward": (1, 2), "optimizer": (2, 3)}
    return Turn(
        **{
            part.name: statistics.median(
                clock.seconds(step[between[part.name][0]], step[between[part.name][1]]) for step in marks
            )
            for part in fields(Turn)
        }
    )


def ratios(contenders: Contenders, name: str, reference: str) -> list[float]:
    """In each round, how many times as long a step of ``name`` takes as one of ``reference``."""
    pairs = zip(contenders[name].medians(), contenders[reference].medians(), strict=True)
    return [theirs / ours for theirs, ours in pairs]


def spread(values: list[float], form: str = "{:.1f}") -> str:
    """``median (min … max)``"""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} … {form.format(max(values))})"
