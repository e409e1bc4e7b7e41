"""The text of ``--explain``: every resolved value, where it came from, and what the numbers come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimegatron.config.config import GROUPS, Config
from trimegatron.config.options import Option, options_of, show_number


def explain(config: Config, sources: Mapping[str, str], notes: Sequence[str] = ()) -> str:
    """One line a value, by group, then the sizes and the corner points of the schedule.

    Args:
        config: the resolved configuration.
        sources: field name → where a value that was given came from.
        notes: lines to add at the end.
    """
    lines: list[str] = []
    for name, group in GROUPS.items():
        lines += ["", (group.__doc__ or name).partition("\n")[0]]
        rows = [
            _row(option, getattr(getattr(config, name), option.name), sources) for option in options_of(group).values()
        ]
        if name == "parallel":
            rows.append(("world-size", str(config.parallel.world_size), "launcher"))
            rows.append(("data-parallel-size", str(config.parallel.data_parallel_size), "derived"))
        if name == "precision":
            rows.append(("params-dtype", config.precision.params_dtype, "derived"))
        lines += [f"  {field:<36} {value:<28} {source}".rstrip() for field, value, source in rows]
    lines += ["", "Sizes and schedule", *(f"  {line}" for line in _summary(config))]
    if notes:
        lines += ["", "Notes", *(f"  {note}" for note in notes)]
    return "\n".join(lines[1:]) + "\n"


def _row(option: Option, value: Any, sources: Mapping[str, str]) -> tuple[str, str, str]:
    source = sources.get(option.name)
    if source is None:
        how = option.declaration.derived
        derived = value != option.default
        source = ("derived" if derived else "default") + (f": {how}" if how and (derived or value is None) else "")
    unit = option.declaration.unit
    return option.flag[2:], _show(value) + (f" {unit}" if unit and value is not None else ""), source


def _show(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return show_number(value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _summary(config: Config) -> Iterator[str]:
    training, schedule = config.training, config.schedule
    batch, sizes = training.global_batch_size, training.batch_sizes
    yield (
        f"global batch: {batch} samples = {training.micro_batch_size} (micro-batch) x "
        f"{config.parallel.data_parallel_size} (data parallel) x {config.num_micro_batches} (micro-batches a step)"
    )
    if sizes.start < batch:
        yield (
            f"batch ramp: {sizes.start} samples, then {sizes.increment} more at a time, {batch} from sample "
            f"{sizes.ramp_samples:,} on, iteration {sizes.iteration_at(sizes.ramp_samples):,.10g}"
        )
    whole = config.num_samples
    yield (
        f"whole run: {training.train_iters:,} iterations, {whole:,} samples, "
        f"{whole * config.data.seq_length:,} tokens; {batch * config.data.seq_length:,} tokens a step"
    )
    corners = [
        ("start", 0),
        ("warm-up ends", schedule.warmup_samples),
        *([("decay begins", schedule.stable_samples)] if schedule.style == "WSD" else []),
        ("decay ends", schedule.decay_samples),
        ("run ends", schedule.total_samples),
    ]
    for name, samples in corners:
        yield (
            f"{name + ':':<14} iteration {sizes.iteration_at(samples):>12,.10g}   sample {samples:>16,.10g}   "
            f"learning rate {schedule.learning_rate(samples):.6g}"
        )
