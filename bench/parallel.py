"""``trimegatron bench parallel --world-size N FLAGS``: what a training step sends, beside the formulas of the papers.

FLAGS are those of training; without them a tiny model. Every message of one rank of each pipeline stage is recorded as
torch.distributed issues it, in the second step of a dry run: the code of a real run under a process group that sends
nothing, so any layout can be counted on one CPU. What no formula explains is listed, and makes the exit code 1.

Sources: Shoeybi et al., "Megatron-LM" (2019), section 3; Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters" (2021), sections 3.2 and 4.1; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trimegatron.bench.results import OURS, Result, counted
from trimegatron.bench.runner import record, sweep_values, take_output, with_parameter
from trimegatron.communication import AXES, Message
from trimegatron.config import Config, read_train_args
from trimegatron.config.config import GROUPS
from trimegatron.config.options import kebab, options_of
from trimegatron.config.train_args import CommandConfig
from trimegatron.dry_run import Walk, assume_vocabulary, stage_ranks, walk
from trimegatron.errors import UserError

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 1000"
)
"""The model that is counted where FLAGS say nothing else; a later flag wins."""
OUTPUT_HELP = """With --out FILE the figures are written for `trimegatron bench report`; --sweep NAME [VALUE…] counts a
step at several values of a training option, such as world-size."""
SWEEPS = {"world_size": (8, 80, 800, 8000), "hidden_size": (64, 640, 6400)}
A_FEW_NUMBERS = 64
"""Bytes; a larger message is not one of a few numbers."""


@dataclass(frozen=True)
class Formula:
    """Messages that are expected of a rank in a step, and what the papers' form of them makes it send."""

    what: str
    axis: str
    kinds: tuple[str, ...]
    floor: float
    """Bytes that this rank sends by the papers, with ring algorithms."""
    size: int | None = None
    """Bytes of each message; None: any, such as those of a buffer's buckets."""
    count: int | None = None
    """How many; None: any number."""
    largest: float = float("inf")

    def explains(self, message: Message) -> bool:
        is_sized = message.num_bytes == self.size if self.size is not None else message.num_bytes <= self.largest
        return message.axis == self.axis and message.kind in self.kinds and is_sized


class Compared(NamedTuple):
    """Messages of a formula as recorded, and the bytes that a rank sends by them."""

    formula: Formula
    num_messages: int
    sent: float

    def __str__(self) -> str:
        formula, floor = self.formula, self.formula.floor
        ratio = f"{self.sent / floor:.3f}" if floor else "-"
        figures = f"{self.num_messages:>8,} {self.sent / 1e3:>12,.3f} {floor / 1e3:>12,.3f} {ratio:>6}"
        return f"  {formula.what:<46} {formula.axis:<10} {figures}"


def main(argv: list[str]) -> int:
    """Record, compare, print.

    Raises:
        UserError: a message that no formula explains, or not as many as one says.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: trimegatron bench parallel --world-size N [TRAINING OPTION…]\n\n{__doc__}\n{OUTPUT_HELP}")
        return 0
    output, flags = take_output(argv)
    options = {
        name: option for group in (CommandConfig, *GROUPS.values()) for name, option in options_of(group).items()
    }
    swept = sweep_values(options, output, SWEEPS)

    def found() -> Iterator[Result]:
        if swept is None:
            yield from results(flags)
            return
        name, values = swept
        for value in values:
            print(f"\n== {name} {value:,}")
            for result in results([*flags, kebab(name), str(value)]):
                yield with_parameter(result, name, value)

    return record("parallel", argv, found(), output.out, ())


def results(flags: Sequence[str]) -> Iterator[Result]:
    """What one rank of each stage sends, printed in a table."""
    command = read_train_args([*TINY.split(), "--dry-run", *flags], world_size=1)
    config, _ = assume_vocabulary(command.config)
    parallel = config.parallel
    print(
        f"{parallel.world_size} ranks: data {parallel.data_parallel_size} × tensor "
        f"{parallel.tensor_model_parallel_size} × pipeline {parallel.pipeline_model_parallel_size}; "
        f"{config.num_micro_batches} micro-batches a step; kB of 1000 that a rank sends, with ring algorithms"
    )
    unexpected: list[str] = []
    for rank in stage_ranks(config):
        walked = walk(config, rank)
        rows, wrong = compare(walked, formulas(config, walked))
        print(f"\nrank {rank}, pipeline stage {walked.mesh.pipeline.rank}")
        print(f"  {'':<46} {'axis':<10} {'messages':>8} {'recorded':>12} {'papers':>12} {'ratio':>6}")
        print("\n".join(map(str, rows)))
        unexpected += [f"rank {rank}: {line}" for line in wrong]
        for row in rows:
            yield from row_results(row, config, walked)
    if unexpected:
        raise UserError(f"what was sent is not what the formulas say: {'; '.join(unexpected)}")
    print("\nno message is unexpected")


def row_results(row: Compared, config: Config, walked: Walk) -> Iterator[Result]:
    """One line of the table, with all that it depends on. The number of data-parallel ranks follows from the others."""
    model, parallel = config.model, config.parallel
    case = f"{row.formula.what} ({row.formula.axis})"
    parameters: dict[str, Any] = {
        "world_size": parallel.world_size, "tensor_parallel": parallel.tensor_model_parallel_size,
        "pipeline_parallel": parallel.pipeline_model_parallel_size, "stage": f"number {walked.mesh.pipeline.rank}",
        "model_chunks": config.num_model_chunks, "sequence_parallel": parallel.sequence_parallel,
        "distributed_optimizer": parallel.use_distributed_optimizer,
        "recompute": config.recompute.recompute_granularity or "nothing", "micro_batches": config.num_micro_batches,
        "micro_batch_size": config.training.micro_batch_size, "seq_length": config.data.seq_length,
        "num_layers": model.num_layers, "hidden_size": model.hidden_size, "vocab_size": model.vocab_size,
    }  # fmt: skip
    yield counted(case, OURS, "sent", "bytes", row.sent, **parameters)
    if row.formula.floor:
        yield counted(case, "the papers' formula", "sent", "bytes", row.formula.floor, **parameters)
    yield counted(case, OURS, "messages", "messages", row.num_messages, **parameters)


def compare(walked: Walk, expected: Sequence[Formula]) -> tuple[list[Compared], list[str]]:
    """What was recorded of each formula; and what is not as the formulas say."""
    sizes = {axis: getattr(walked.mesh, axis).size for axis in AXES}
    left = walked.messages.copy()
    rows, wrong = [], []
    for formula in sorted(expected, key=lambda formula: formula.size is None):  # the sure ones choose first
        mine = [message for message in left if formula.explains(message)]
        count = sum(left[message] for message in mine)
        sent = sum(left[message] * message.sent(sizes[message.axis]) for message in mine)
        for message in mine:
            del left[message]
        if formula.count not in (None, count):
            wrong.append(f"{count} messages for {formula.what} on the {formula.axis} axis, not {formula.count}")
        if count or formula.floor:
            rows.append(Compared(formula, count, sent))
    for message, count in sorted(left.items()):
        wrong.append(f"{count} × {message.kind} of {message.num_bytes:,} bytes on the {message.axis} axis, unexplained")
    return rows, wrong


def formulas(config: Config, walked: Walk) -> list[Formula]:
    """What one rank's step takes by the papers.

    s sequence, b micro-batch, h hidden; a and g bytes of an activation (and parameter) and of a main gradient; l layers
    of this rank, m micro-batches; t, p, d sizes of the tensor, pipeline and data axes; N parameters of this rank.
    """
    scalars = [
        Formula("loss, tokens, norm: a few numbers", axis, ("all-reduce",), 0.0, largest=A_FEW_NUMBERS)
        for axis in AXES  # an axis as large as the world has its group
    ]
    return [*scalars, *_tensor(config, walked), *_pipeline(config, walked), *_data(config, walked)]


def _activation_bytes(config: Config) -> int:
    """s · b · h · a."""
    itemsize = getattr(torch, config.precision.params_dtype).itemsize
    return config.data.seq_length * config.training.micro_batch_size * config.model.hidden_size * itemsize


def _tensor(config: Config, walked: Walk) -> list[Formula]:
    """Per layer and micro-batch two sums of s·b·h forward and two backward; one more forward for the word embedding,
    one more backward for the head (Shoeybi). Full recomputation repeats a layer's two forward ones.

    With sequence parallelism a reduce-scatter and an all-gather stand for each sum, of the same bytes together; and
    each of the two column-parallel matrices and the head gathers its input once more, for its weight gradient
    (Korthikanti). What is computed from a piece of the sequence, the gradients of norms, row-parallel biases and
    positions, is summed once a step.

    The cross entropy sums three numbers of each token, fp32, in three all-reduces; here they are gathered at once.
    """
    mesh, t = walked.mesh, walked.mesh.tensor.size
    if t == 1:
        return []
    num_micro_batches, size = config.num_micro_batches, _activation_bytes(config)
    is_first, is_last = mesh.pipeline.rank == 0, mesh.is_last_stage
    sums = num_micro_batches * (4 * len(walked.layers) + 2 * _num_replayed(config, walked) + is_first + is_last)
    again = num_micro_batches * (2 * len(walked.layers) + is_last)
    found = []
    if config.parallel.sequence_parallel:
        for kind, count in (("reduce-scatter", sums), ("all-gather", sums + again)):
            floor = count * Message(kind, "tensor", size).sent(t)
            found.append(Formula(f"layers, embedding, head: {kind}", "tensor", (kind,), floor, size, count))
        partial = walked.gradient_bytes_of(lambda spec: spec.is_partial)
        floor = Message("all-reduce", "tensor", partial).sent(t)
        found.append(Formula("partial sums: norms, biases, positions", "tensor", ("all-reduce",), floor))
    else:
        floor = sums * Message("all-reduce", "tensor", size).sent(t)
        found.append(Formula("layers, embedding, head", "tensor", ("all-reduce",), floor, size, sums))
    if is_last:
        numbers = config.data.seq_length * config.training.micro_batch_size * 4
        floor = num_micro_batches * 3 * Message("all-reduce", "tensor", numbers).sent(t)
        found.append(Formula("cross entropy", "tensor", ("all-gather",), floor, 3 * numbers * t, num_micro_batches))
    return found


def _num_replayed(config: Config, walked: Walk) -> int:
    """Layers of this rank that full recomputation runs forward twice: all, or the first of each of its stages."""
    recompute = config.recompute
    if recompute.recompute_granularity != "full":
        return 0
    if recompute.recompute_method == "uniform":
        return len(walked.layers)
    chunks = config.num_model_chunks
    return chunks * min(recompute.recompute_num_layers, len(walked.layers) // chunks)


def _pipeline(config: Config, walked: Walk) -> list[Formula]:
    """Per micro-batch, boundary and direction s·b·h / t: with sequence parallelism the piece itself, without it 1/t of
    what all tensor-parallel ranks hold alike, which Megatron's receiver gathers (Narayanan, "scatter/gather") and torch
    sends whole. The two copies of the word table add up their gradients, once a step."""
    mesh, t = walked.mesh, walked.mesh.tensor.size
    rank, p = mesh.pipeline.rank, mesh.pipeline.size
    if p == 1:
        return []
    num_micro_batches, chunks = config.num_micro_batches, config.num_model_chunks
    stages = [chunk * p + rank for chunk in range(chunks)]
    after = num_micro_batches * sum(stage < chunks * p - 1 for stage in stages)  # boundaries behind these stages
    before = num_micro_batches * sum(stage > 0 for stage in stages)
    size = _activation_bytes(config) // (t if config.parallel.sequence_parallel else 1)
    floor = (after + before) * _activation_bytes(config) / t
    found = [
        Formula("activations and their gradients", "pipeline", ("send",), floor, size, after + before),
        Formula("the neighbours' activations and gradients", "pipeline", ("receive",), 0.0, size, after + before),
    ]
    if mesh.embedding.size > 1:
        table = walked.gradient_bytes_of(lambda spec: spec.global_shape[0] == config.model.vocab_size)
        floor = Message("all-reduce", "embedding", table).sent(2)
        found.append(Formula("gradient of the tied word table", "embedding", ("all-reduce",), floor))
    return found


def _data(config: Config, walked: Walk) -> list[Formula]:
    """2 (d-1)/d · N · g: the gradients are summed and every rank has the sum. With the distributed optimizer each rank
    has its part of the sum, and all get the parameters: (d-1)/d · N · (g + a)."""
    d = walked.mesh.data.size
    if d == 1:
        return []
    gradients = walked.gradient_bytes_of(lambda spec: True)
    if config.parallel.use_distributed_optimizer:
        parameters = walked.num_parameters * getattr(torch, config.precision.params_dtype).itemsize
        floor = Message("reduce-scatter", "data", gradients).sent(d) + Message("all-gather", "data", parameters).sent(d)
        what = "gradients, then parameters"
    else:
        floor, what = Message("all-reduce", "data", gradients).sent(d), "gradients"
    return [Formula(what, "data", ("all-reduce", "reduce-scatter", "all-gather"), floor)]
