"""Rules between the groups of a configuration, and what the machine must have. Each failure is one ConfigError.

Rules inside one group are in the group's ``__post_init__``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from trimegatron.config.groups import ParallelConfig, TrainingConfig
from trimegatron.config.io_groups import DataConfig
from trimegatron.config.options import fail, kebab

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


def check_length(training: TrainingConfig) -> None:
    """The run has one length, of at least one step."""
    iterations, samples, batch = training.train_iters, training.train_samples, training.global_batch_size
    if samples is None:
        if iterations is None:
            fail("train_iters", None, "or --train-samples is required", way_out="Say how long to train.")
        return
    if samples < batch:
        fail(
            "train_samples",
            samples,
            f"must hold at least one global batch ({batch})",
            way_out="Train on more samples or lower --global-batch-size.",
        )
    if iterations not in (None, samples // batch):
        fail(
            "train_iters",
            iterations,
            f"and --train-samples ({samples}) exclude each other",
            f"{samples} samples are {samples // batch} iterations of {batch}",
            "Give one of the two.",
        )


def check_config(config: Config) -> None:
    """Every rule that needs more than one group. ``config`` is resolved: no derived value is missing."""
    _check_shapes(config)
    _check_pipeline(config)
    check_num_micro_batches(config.num_micro_batches, config.parallel)
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
    if config.data.seq_length > model.max_position_embeddings:
        fail(
            "seq_length",
            config.data.seq_length,
            f"must not be above --max-position-embeddings ({model.max_position_embeddings})",
            way_out="Shorten the samples or enlarge the position table.",
        )


def check_num_micro_batches(num_micro_batches: int, parallel: ParallelConfig) -> None:
    """Whether the pipeline schedule can run a step of so many micro-batches: every number, but for interleaving."""
    pp = parallel.pipeline_model_parallel_size
    if parallel.num_layers_per_virtual_pipeline_stage is not None and num_micro_batches % pp:
        fail(
            "num_layers_per_virtual_pipeline_stage",
            parallel.num_layers_per_virtual_pipeline_stage,
            "needs a number of micro-batches in each step (global batch / micro-batch size / data parallel size) that "
            f"is a multiple of --pipeline-model-parallel-size ({pp})",
            f"it is {num_micro_batches}",
            "Change --global-batch-size or --micro-batch-size, or leave the option out.",
        )


def _check_pipeline(config: Config) -> None:
    """Every pipeline stage has layers, and the same number of them unless it is given."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, per_stage = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    layers = f"--num-layers ({num_layers})"
    for name, value in (
        ("num_layers_per_virtual_pipeline_stage", per_stage),
        ("decoder_first_pipeline_num_layers", first),
        ("decoder_last_pipeline_num_layers", last),
    ):
        if value is None:
            continue
        if pp == 1:
            fail(name, value, "needs --pipeline-model-parallel-size above 1", way_out="Leave it out.")
        if per_stage is not None and value is not per_stage:
            fail(
                name,
                value,
                f"and --num-layers-per-virtual-pipeline-stage ({per_stage}) exclude each other",
                way_out="Leave one of the two out.",
            )
    if first is not None or last is not None:
        rest = num_layers - (first or 0) - (last or 0)
        middle = pp - (first is not None) - (last is not None)
        if rest < middle or rest % middle if middle else rest:
            name = "decoder_last_pipeline_num_layers" if first is None else "decoder_first_pipeline_num_layers"
            both = f" and --decoder-last-pipeline-num-layers ({last})" if first is not None and last is not None else ""
            fail(
                name,
                last if first is None else first,
                f"{both} must leave of {layers} "
                + (f"a multiple of {middle}, for the other {middle} stages" if middle else "none").strip(),
                f"{rest} are left",
                "Change the sizes of the stages.",
            )
        return
    if per_stage is None and num_layers % pp:
        fail(
            "pipeline_model_parallel_size",
            pp,
            f"must divide {layers}",
            f"the division leaves {num_layers % pp}",
            "Change one of the two, or give the first or the last stage a size of its own with "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers.",
        )
    if per_stage is not None and (num_layers % (pp * per_stage) or num_layers == pp * per_stage):
        fail(
            "num_layers_per_virtual_pipeline_stage",
            per_stage,
            f"x --pipeline-model-parallel-size ({pp}) must divide {layers} into at least two stages on each rank",
            f"the product is {pp * per_stage}",
            "Change one of the three, or leave the option out for one stage on each rank.",
        )


def _check_schedule(config: Config) -> None:
    """A run by iterations takes no option in samples, and the other way round; the warm-up ends before the decay."""
    optimizer, training = config.optimizer, config.training
    by_iterations = training.train_samples is None
    wrong, right = ("samples", "iters") if by_iterations else ("iters", "samples")
    for stem in ("lr_decay", "lr_warmup"):
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


def check_machine(config: Config) -> None:
    """The input files and the optional packages the configuration asks for; not asked of a configuration read back."""
    _check_data_path(config.data)
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
    if config.logging.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        fail(
            "tensorboard_dir",
            config.logging.tensorboard_dir,
            "needs the tensorboard package, which is not installed",
            way_out="Run: pip install 'trimegatron[tensorboard]', or leave the option out.",
        )


def _check_data_path(data: DataConfig) -> None:
    blends = data.blends()
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
