"""One step's forward and backward passes over its micro-batches: a plain loop, or a pipeline over several ranks.

This is the one file that knows torch.distributed.pipelining, which sends, receives, and keeps the order. It passes
whole activations between neighbours, and allocates a receive buffer for each micro-batch of a step.

Legend: p pipeline ranks, v stages on each of them, m micro-batches of a step. Stage i lives on rank i mod p.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trimegatron.data.loader import Batch
from trimegatron.mesh import Axis


class Engine:
    """Runs micro-batches through the model, of which this rank holds ``chunks``: its stages, first to last.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved"; the last alone takes several chunks.
        activation: what one stage sends the next, on the meta device; its gradient looks alike.
    """

    def __init__(self, chunks: Iterable[nn.Module], *, pipeline: Axis, schedule: str, activation: torch.Tensor):
        self.chunks = list(chunks)
        self.pipeline = pipeline
        self.schedule = schedule
        self.activation = activation
        self.prepared: _Pipeline | None = None

    def run(self, batches: Iterable[Batch], *, backward_scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run every micro-batch forward and, with ``backward_scale``, backward from loss · backward_scale.

        Every pipeline rank gives it the same micro-batches. Their number may change from call to call.

        Returns:
            The sum of the losses of all unmasked tokens (0 where the last stage is not here) and the number of those
            tokens, of this rank's micro-batches: fp32 scalars on the device, nothing waits for them here.
        """
        if self.pipeline.group is None:
            (stage,) = self.chunks
            return run_micro_batches(stage, batches, backward_scale=backward_scale)
        batches = list(batches)
        shape = (len(batches), backward_scale is not None)
        if self.prepared is None or self.prepared.shape != shape:
            # Only the last one is kept: each has receive buffers of its own, and a change costs one small message.
            self.prepared = None
            self.prepared = _Pipeline(self, *shape)
        return self.prepared.run(batches, backward_scale)


def run_micro_batches(
    stage: nn.Module, batches: Iterable[Batch], *, backward_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:meth:`Engine.run` where one rank holds the whole model."""
    losses, counts = [], []
    for batch in batches:
        loss = forward(stage, batch.tokens, batch)
        if backward_scale is not None:
            (loss * backward_scale).backward()
        losses.append(loss.detach())
        counts.append(batch.loss_mask.sum())
    return in_order(losses), in_order(counts)


def forward(stage: nn.Module, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """One stage's forward pass: ``x`` is the tokens, or what the stage before has sent."""
    return stage(
        x,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        sample_numbers=batch.sample_numbers,
        position_ids=batch.position_ids,
        document_starts=batch.document_starts,
    )


def in_order(scalars: list[torch.Tensor]) -> torch.Tensor:
    """The sum, from first to last: with a pipeline the same bits as without."""
    assert scalars, "a step has at least one micro-batch"
    total = scalars[0]
    for scalar in scalars[1:]:
        total = total + scalar
    return total


class _Chunk(nn.Module):
    """A stage as the library calls it: (activation, number of the micro-batch) -> activation, or the sum of losses.

    The library hands on numbers; the micro-batches themselves lie here, since every rank has read them.
    """

    def __init__(self, stage: nn.Module, *, is_first: bool, is_last: bool):
        super().__init__()
        self.stage = stage
        self.is_first, self.is_last = is_first, is_last
        self.batches: list[Batch] = []
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        batch = self.batches[int(number)]
        y = forward(self.stage, batch.tokens if self.is_first else x, batch)
        if self.is_last:
            self.losses.append(y.detach())
        return y


class _Pipeline:
    """A schedule of the library, made for one number of micro-batches, with or without their backward passes."""

    def __init__(self, engine: Engine, num_micro_batches: int, has_backward: bool):
        from torch.distributed.pipelining import PipelineStage  # only where there is a pipeline

        # Where one rank failed, the library would log its whole schedule on each other; the error is raised anyway.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        self.shape = (num_micro_batches, has_backward)
        self.backward_scale: float | None = None
        num_stages = engine.pipeline.size * len(engine.chunks)
        numbers = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta")
        activation = engine.activation.detach().requires_grad_(has_backward)
        device = next(engine.chunks[0].parameters()).device
        self.chunks: list[_Chunk] = []
        stages: list[Any] = []
        for k, module in enumerate(engine.chunks):
            index = k * engine.pipeline.size + engine.pipeline.rank
            chunk = _Chunk(module, is_first=index == 0, is_last=index == num_stages - 1)
            self.chunks.append(chunk)
            stages.append(
                PipelineStage(
                    chunk,
                    index,
                    num_stages,
                    device,
                    # Given the shapes, the library need not find them out by one more forward pass.
                    input_args=numbers if chunk.is_first else activation,
                    output_args=loss if chunk.is_last else activation,
                    group=engine.pipeline.group,
                )
            )
        # Without a loss the library's schedules leave out everything backward.
        self.schedule = make_schedule(
            engine.schedule, stages, num_micro_batches, loss_fn=self.scaled if has_backward else None
        )

    def scaled(self, loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """What the last stage's backward pass starts from."""
        assert self.backward_scale is not None
        return loss * self.backward_scale

    def run(self, batches: list[Batch], backward_scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.backward_scale = backward_scale
        for chunk in self.chunks:
            chunk.batches, chunk.losses = batches, []
        numbers = torch.arange(len(batches))  # on the CPU: reading one waits for nothing
        self.schedule.step(numbers, number=numbers, target=numbers, return_outputs=False)
        last = self.chunks[-1]
        loss = in_order(last.losses) if last.is_last else torch.zeros((), device=batches[0].loss_mask.device)
        for chunk in self.chunks:
            chunk.batches = []
        return loss, in_order([batch.loss_mask.sum() for batch in batches])


def runs_as(schedule: str, num_micro_batches: int, num_stages: int) -> str:
    """The schedule that runs where ``schedule`` is asked for: the library's 1F1B needs a micro-batch for each stage."""
    return "gpipe" if schedule == "1f1b" and num_micro_batches < num_stages else schedule


def make_schedule(schedule: str, stages: list[Any], num_micro_batches: int, *, loss_fn: Any) -> Any:
    """The library's schedule over this rank's stages. Nobody divides gradients (docs/gradients.md)."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    options: dict[str, Any] = {"n_microbatches": num_micro_batches, "loss_fn": loss_fn, "scale_grads": False}
    schedule = runs_as(schedule, num_micro_batches, stages[0].num_stages)
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, **options)
    (stage,) = stages
    return (Schedule1F1B if schedule == "1f1b" else ScheduleGPipe)(stage, **options)


Action = tuple[str, int, int]
"""("forward" or "backward", stage, micro-batch)."""


class _Trace:
    """A stage that computes and sends nothing, and notes in which order the library asks for its passes."""

    def __init__(self, stage: int, num_stages: int, num_ranks: int, actions: list[Action]):
        self.stage_index, self.num_stages = stage, num_stages
        self.group_rank, self.group_size = stage % num_ranks, num_ranks
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.submod = self.device = None
        self.actions = actions

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.actions.append(("forward", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.actions.append(("backward", self.stage_index, number))

    def no_messages(self, _: int) -> list[Any]:
        return []

    def nothing(self, *_: Any) -> None:
        pass

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages
    clear_runtime_states = perform_reduce_grad = nothing


def action_order(schedule: str, *, num_ranks: int, num_chunks: int, num_micro_batches: int) -> list[list[Action]]:
    """What each rank computes, in the order in which the library runs it; no process group is needed.

    (What the library says of its order in ``pipeline_order`` is, for 1F1B, not what it runs.)
    """
    num_stages, numbers = num_ranks * num_chunks, torch.arange(num_micro_batches)
    order: list[list[Action]] = []
    for rank in range(num_ranks):
        actions: list[Action] = []
        stages = [_Trace(stage, num_stages, num_ranks, actions) for stage in range(rank, num_stages, num_ranks)]
        library = make_schedule(schedule, stages, num_micro_batches, loss_fn=None)
        library._initialize_stage = library._initialize_stages = lambda *_, **__: None
        library.step(numbers, number=numbers, target=numbers, return_outputs=False)
        order.append(actions)
    return order
