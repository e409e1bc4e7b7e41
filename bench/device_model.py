"""CodeParrot-small on a device, in rounds: ours, ours with the references, and a compiled nanoGPT twice, whose two
copies tell what a difference must exceed to be one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trimegatron.bench.models import gpt2_spec
from trimegatron.bench.results import OURS, Result, counted, measured
from trimegatron.bench.rounds import Contender, compare_losses, ratios, spread, start, take_turns
from trimegatron.bench.step import CONFIGURATIONS
from trimegatron.bench.step_report import StepReport
from trimegatron.bench.trace import read, record
from trimegatron.bench.variants import Batch, initial_weights, makers
from trimegatron.errors import UserError
from trimegatron.model.spec import GPTSpec

NAME = "codeparrot-small"
REFERENCES, RIVAL, AGAIN = "trimegatron references", "nanoGPT compiled", "nanoGPT compiled again"
TRACED_STEPS, LISTED_KERNELS = 3, 10
DRY: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 16,
                       "micro_batch_size": 1, "vocab_size": 64}  # fmt: skip
"""As little as Triton's interpreter has the time for."""


@dataclass(frozen=True)
class Form:
    """How the rounds are run: really, or dry."""

    micro_batch_size: int
    compile_backend: str
    rounds: int
    steps: int


def form(device: torch.device, dropout: float, *, dry: bool) -> tuple[GPTSpec, Form]:
    """The configuration; dry, at a tiny size and with the kernels in Triton's interpreter."""
    preset = CONFIGURATIONS[NAME] | (DRY if dry else {})
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    spec = gpt2_spec(
        **{name: preset[name] for name in names}, attention_dropout=dropout, hidden_dropout=dropout, device=device,
        dtype=getattr(torch, preset["dtype"]), kernels="triton",
    )  # fmt: skip
    batch = preset["micro_batch_size"]
    return spec, Form(batch, "aot_eager", 1, 2) if dry else Form(batch, "inductor", 7, 8)


def run_rounds(device: torch.device, dropout: float, *, dry: bool, deadline: float) -> StepReport:
    """Compare and time. No round begins after ``deadline`` (``time.monotonic``), but the first.

    Raises:
        UserError: the losses differ, or our step does not fit into the GPU's memory.
    """
    spec, how = form(device, dropout, dry=dry)
    made = makers(spec, initial_weights(spec), Batch.random(spec, how.micro_batch_size),
                  compile_backend=how.compile_backend)  # fmt: skip
    torch.compiler.reset()
    contenders = start(
        {OURS: made[OURS], RIVAL: made[RIVAL], AGAIN: made[RIVAL], REFERENCES: made[REFERENCES]}, device=device
    )
    if OURS not in contenders:
        raise UserError("the GPU's memory does not hold our own step of CodeParrot-small; no other process may use it")
    print(compare_losses(contenders, dtype=spec.dtype, drops=dropout > 0.0))
    take_turns(contenders, device=device, rounds=1, steps=how.steps)
    done = 1 + take_turns(contenders, device=device, rounds=how.rounds - 1, steps=how.steps, deadline=deadline)
    if done < how.rounds:
        print(f"left out, the time is up: {how.rounds - done} of {how.rounds} rounds")
    found = StepReport(NAME, spec, how.micro_batch_size, contenders)
    print("\n".join(found.lines()))
    if {RIVAL, AGAIN} <= contenders.keys():
        print(f"{AGAIN} takes {spread(ratios(contenders, AGAIN, RIVAL), '{:.3f}')} times as long as the first: noise")
    return found


def trace(contender: Contender, dropout: float, device: torch.device) -> Iterator[Result]:
    """Launches of a step of ours, how long the device idles, and the kernels that take longest."""

    def steps() -> None:
        for _ in range(TRACED_STEPS):
            contender.variant.step()

    found = read(record(steps, device), device.type)
    what = "launches" if device.type == "cuda" else "operators"
    print(f"trace of {TRACED_STEPS} steps: {found.launches / TRACED_STEPS:g} {what} a step, the device idles "
          f"{found.idle_share:.1%} of the time; most of it goes to")  # fmt: skip
    about: dict[str, Any] = {"model": NAME, "dropout": dropout}
    yield counted("trace", OURS, f"{what} a step", "", found.launches / TRACED_STEPS, **about)
    yield measured("trace", OURS, "idle share", "of the time", [found.idle_share], **about)
    for place, (name, number, seconds) in enumerate(found.longest[:LISTED_KERNELS], start=1):
        print(f"  {1e3 * seconds / TRACED_STEPS:9.3f} ms a step in {number / TRACED_STEPS:g}: {name[:90]}")
        yield measured(
            "trace", OURS, "time a step", "s", [seconds / TRACED_STEPS], note=f"{number / TRACED_STEPS:g} × {name}",
            place=f"{place} of {LISTED_KERNELS}", **about,
        )  # fmt: skip
