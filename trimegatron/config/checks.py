"""Rules between the groups of a configuration, and what the machine must have. Each failure is one ConfigError.

Rules inside one group are in the group's ``__post_init__``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from trimegatron.config.groups import ParallelConfig, TrainingConfig
from trimegatron.config.options import fail, kebab
from trimegatron.config.pipeline import check_num_micro_batches, check_stages
from trimegatron.config.schedule import Schedule
from trimegatron.errors import ConfigError

if TYPE_CHECKING:
    from trimegatron.config.config import Config


def check_global_batch(training: TrainingConfig, parallel: ParallelConfig) -> None:
    """The global batch is cut into whole micro-batches on every data-parallel rank."""
    one_pass = training.micro_batch_size * parallel.data_parallel_size
    if training.global_batch_size % one_pass:
        fail(
            "global_batch_size",
            training.global_batch_size,
            f"must be a multiple of --micro-batch-size ({training.micro_batch_size}) x data parallel size "
            f"({parallel.data_parallel_size})",
            f"{training.global_batch_size} / {one_pass} leaves {training.global_batch_size % one_pass}",
            f"Use a multiple of {one_pass}, or another micro-batch size or number of processes.",
        )
    if training.rampup_batch_size is not None:
        _check_ramp(training, one_pass)


def _check_ramp(training: TrainingConfig, one_pass: int) -> None:
    """The batch grows in whole increments, and every size on the way is cut into whole micro-batches."""
    assert training.rampup_batch_size is not None
    name, shown = "rampup_batch_size", " ".join(map(str, training.rampup_batch_size))
    start, increment, _ = training.rampup_batch_size
    full = training.global_batch_size
    if training.train_samples is None:
        fail(name, shown, "needs a run by samples", way_out="Give --train-samples in place of --train-iters.")
    if start >= full:
        fail(
            name,
            shown,
            f"must start below --global-batch-size ({full})",
            way_out="Start smaller, or leave the option out.",
        )
    if (full - start) % increment:
        fail(
            name,
            shown,
            f"must reach --global-batch-size ({full}) in whole increments",
            f"({full} - {start}) / {increment} leaves {(full - start) % increment}",
            "Change one of the three.",
        )
    for size in training.batch_sizes.sizes():
        if size % one_pass:
            fail(
                name,
                shown,
                f"must pass through multiples of --micro-batch-size ({training.micro_batch_size}) x data parallel size "
                f"({one_pass // training.micro_batch_size}) only",
                f"the batch of {size} leaves {size % one_pass} of {one_pass}",
                f"Use a start and an increment that are multiples of {one_pass}.",
            )


def check_length(training: TrainingConfig) -> None:
    """The run has one length, of at least one step."""
    iterations, samples, batch = training.train_iters, training.train_samples, training.global_batch_size
    if samples is None:
        if iterations is None:
            fail("train_iters", None, "or --train-samples is required", way_out="Say how long to train.")
        return
    sizes = training.batch_sizes
    if samples < sizes.start:
        fail(
            "train_samples",
            samples,
            f"must hold at least one global batch ({sizes.start})",
            way_out="Train on more samples or lower --global-batch-size.",
        )
    if iterations not in (None, sizes.num_steps(samples)):
        fail(
            "train_iters",
            iterations,
            f"and --train-samples ({samples}) exclude each other",
            f"{samples} samples are {sizes.num_steps(samples)} iterations of {batch}",
            "Give one of the two.",
        )


def check_config(config: Config) -> None:
    """Every rule that needs more than one group. ``config`` is resolved: no derived value is missing."""
    _check_shapes(config)
    check_stages(config)
    for size in config.training.batch_sizes.sizes():
        check_num_micro_batches(config.micro_batches_of(size), config.parallel)
    _check_schedule(config)
    if config.data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        fail("vocab_size", None, "is required with --tokenizer-type NullTokenizer", way_out="Give the number of ids.")
    if config.checkpoint.save is not None and config.checkpoint.save_interval is None:
        fail(
            "save_interval",
            None,
            f"is required with --save ({config.checkpoint.save})",
            way_out="Say every how many iterations to save.",
        )
    if config.training.skip_train and config.training.eval_iters == 0:
        fail("skip_train", None, "needs --eval-iters above 0", way_out="Say how many global batches to evaluate on.")
    _check_supported(config)


def _check_shapes(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "ffn_hidden_size"):
        value = getattr(model, name)
        if value % tp:
            fail(
                name,
                value,
                f"must be a multiple of --tensor-model-parallel-size ({tp})",
                f"{value} / {tp} leaves {value % tp}",
                "Change one of the two.",
            )
    if config.parallel.sequence_parallel and config.data.seq_length % tp:
        fail(
            "seq_length",
            config.data.seq_length,
            f"must be a multiple of --tensor-model-parallel-size ({tp}) with --sequence-parallel",
            f"{config.data.seq_length} / {tp} leaves {config.data.seq_length % tp}",
            "Change one of the two, or leave --sequence-parallel out.",
        )
    if config.recompute.recompute_num_layers > model.num_layers:
        fail(
            "recompute_num_layers",
            config.recompute.recompute_num_layers,
            f"must not be above --num-layers ({model.num_layers})",
        )
    if config.data.seq_length > model.max_position_embeddings:
        fail(
            "seq_length",
            config.data.seq_length,
            f"must not be above --max-position-embeddings ({model.max_position_embeddings})",
            way_out="Shorten the samples or enlarge the position table.",
        )


def _check_schedule(config: Config) -> None:
    """A run by iterations takes no option in samples, and the other way round; the warm-up ends before the decay."""
    optimizer, training = config.optimizer, config.training
    by_iterations = training.train_samples is None
    wrong, right = ("samples", "iters") if by_iterations else ("iters", "samples")
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(optimizer, f"{stem}_{wrong}")
        if value:
            fail(
                f"{stem}_{wrong}",
                value,
                f"needs a run by {'samples' if by_iterations else 'iterations'}, "
                f"but this one has {kebab(f'train_{right}')}",
                way_out=f"Use {kebab(f'{stem}_{right}')} or {kebab(f'train_{wrong}')}.",
            )
    schedule = config.schedule
    if not schedule.warmup_samples < schedule.decay_samples:
        name = f"lr_warmup_{right}"
        decay = kebab(f"lr_decay_{right}")
        fail(
            name,
            getattr(optimizer, name),
            f"must be below {decay} ({getattr(optimizer, f'lr_decay_{right}')})",
            way_out=f"Shorten the warm-up or set {decay} (default: {kebab(f'train_{right}')}).",
        )
    if optimizer.lr_decay_style == "WSD":
        _check_wsd(schedule, f"lr_wsd_decay_{right}", getattr(optimizer, f"lr_wsd_decay_{right}"))


def _check_wsd(schedule: Schedule, name: str, value: int | None) -> None:
    """The decay has a length, and begins behind the warm-up."""
    if value is None:
        fail(name, None, "is required with --lr-decay-style WSD", way_out="Give the length of the decay.")
    if schedule.stable_samples < schedule.warmup_samples:
        fail(
            name,
            value,
            "must fit between the end of the warm-up and that of the decay",
            f"the warm-up ends at sample {schedule.warmup_samples:g}, the decay at {schedule.decay_samples}, and this "
            f"is {schedule.wsd_samples} samples",
            "Shorten the warm-up or this decay.",
        )


def _check_supported(config: Config) -> None:
    """Values Megatron-LM has and this version has not, of options that are otherwise supported."""
    later: list[tuple[str, object, bool, str]] = [
        ("optimizer", config.optimizer.optimizer, config.optimizer.optimizer != "adam", "Use adam."),
        (
            "dataloader_type",
            config.data.dataloader_type,
            config.data.dataloader_type == "external",
            "Use single or cyclic.",
        ),
    ]
    for name, value, refused, way_out in later:
        if refused:
            fail(name, value, "is not supported yet", way_out=way_out)


def check_machine(config: Config, *, only_note: bool = False) -> list[str]:
    """The input files and the optional packages the configuration asks for; not asked of a configuration read back.

    Returns:
        With ``only_note`` what is missing; nothing else would come through.
    """
    missing = []
    for check in (_check_data_path, _check_tokenizer, _check_tensorboard):
        try:
            check(config)
        except ConfigError as error:
            if not only_note:
                raise
            missing.append(str(error))
    return missing


def _check_tokenizer(config: Config) -> None:
    tokenizer = config.data.tokenizer_type
    needed = {
        "GPT2BPETokenizer": (("vocab_file", "--vocab-file"), ("merge_file", "--merge-file")),
        "HuggingFaceTokenizer": (("tokenizer_model", "--tokenizer-model"),),
    }
    for name, flag in needed.get(tokenizer, ()):
        path = getattr(config.data, name)
        if path is None:
            fail(name, None, f"is required with --tokenizer-type {tokenizer}", way_out=f"Give {flag} PATH.")
        if not (Path(path).exists() if name == "tokenizer_model" else Path(path).is_file()):
            fail(name, path, "must be an existing file", "there is none", "Check the path.")


def _check_tensorboard(config: Config) -> None:
    if config.logging.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        fail(
            "tensorboard_dir",
            config.logging.tensorboard_dir,
            "needs the tensorboard package, which is not installed",
            way_out="Run: pip install 'trimegatron[tensorboard]', or leave the option out.",
        )


def _check_data_path(config: Config) -> None:
    blends = config.data.blends()
    if not blends:
        fail(
            "data_path",
            None,
            "is required",
            way_out="Give the prefix that `trimegatron preprocess` wrote, without .bin and .idx.",
        )
    if "data" not in blends and "train" not in blends:
        fail("train_data_path", None, f"is required with --{next(iter(blends))}-data-path", way_out="Add it.")
    for split, blend in blends.items():
        name = "data_path" if split == "data" else f"{split}_data_path"
        for prefix in blend.used:
            _check_pair(name, prefix)


def _check_pair(name: str, prefix: str) -> None:
    for ending in (".bin", ".idx"):
        if not Path(prefix + ending).is_file():
            stem = prefix.removesuffix(".bin").removesuffix(".idx")
            advice = f"Leave out the ending: {kebab(name)} {stem}." if stem != prefix else "Check the path."
            fail(name, prefix, "must be the prefix of a .bin and an .idx file", f"no file {prefix}{ending}", advice)
