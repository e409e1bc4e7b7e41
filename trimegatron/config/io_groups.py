"""The training configuration: data, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass

from trimegatron.config.blend import Blend, parse_blend
from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.config.split import parse_split


@dataclass(frozen=True, kw_only=True)
class DataConfig(Options):
    """Data and tokenizer"""

    data_path: list[str] = option(
        [],
        "prefix of the .bin and .idx files; or WEIGHT PREFIX WEIGHT PREFIX …; or several prefixes, drawn from by size",
        nargs="*",
        metavar="PREFIX",
    )
    train_data_path: list[str] | None = option(
        None, "as --data-path, for training only; all of it is used, there is no --split", metavar="PREFIX"
    )
    valid_data_path: list[str] | None = option(None, "as --train-data-path, for validation", metavar="PREFIX")
    test_data_path: list[str] | None = option(None, "as --train-data-path, for the test", metavar="PREFIX")
    split: str = option("969, 30, 1", "proportions of training, validation and test documents")
    seq_length: int = option(REQUIRED, "tokens of one sample", unit="tokens", minimum=1)
    tokenizer_type: str = option(
        "GPT2BPETokenizer",
        "GPT2BPETokenizer: --vocab-file and --merge-file; HuggingFaceTokenizer: --tokenizer-model; "
        "NullTokenizer: --vocab-size",
        choices=("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
    )
    vocab_file: str | None = option(None, "vocab.json of GPT2BPETokenizer", metavar="FILE", flags=("--vocab",))
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer", metavar="FILE", flags=("--merge",))
    tokenizer_model: str | None = option(None, "folder or tokenizer.json of HuggingFaceTokenizer", metavar="PATH")
    num_workers: int = option(2, "processes that read data ahead; 0 reads in the training process", unit="processes")
    data_cache_path: str | None = option(
        None, "folder for the document, sample and shuffle index", derived="beside the data", metavar="DIR"
    )
    data_impl: str = option(
        "infer",
        "how tokens are read; their layout is told by the file. mmap (infer): mapped; lazy: read when needed, memory "
        "stays flat; cached: held in memory by every process",
        choices=("infer", "mmap", "lazy", "cached"),
    )
    megatron_compat: int = option(
        2026,
        "ours. Megatron-LM's rules of which year cut the splits and size the sets of a blend",
        choices=(2022, 2026),
    )
    dataloader_type: str = option(
        "single",
        "single: one pass over the shuffled index, the same order in every layout; cyclic: shuffled anew in each pass, "
        "in an order that depends on the layout",
        choices=("single", "cyclic", "external"),
    )
    data_sharding: bool = option(
        True, "with cyclic, shuffle over all samples instead of a shard for each data-parallel rank"
    )
    eod_mask_loss: bool = option(False, "no loss where the input is the end-of-document token")
    reset_position_ids: bool = option(False, "positions restart after the end-of-document token")
    reset_attention_mask: bool = option(False, "no attention across the end-of-document token")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_split(self.split, self.megatron_compat)
        self.blends()

    def blends(self) -> dict[str, Blend]:
        """Where the samples come from: under ``data`` what --split cuts, or each split's own under its name.

        Raises:
            ConfigError: both ways at once, or a wrong list.
        """
        own = {split: values for split in ("train", "valid", "test") if (values := getattr(self, f"{split}_data_path"))}
        if own and self.data_path:
            fail(
                f"{next(iter(own))}_data_path",
                " ".join(next(iter(own.values()))),
                "and --data-path exclude each other",
                way_out="Name the sets of each split, or give --data-path with --split.",
            )
        found = {split: parse_blend(values, f"{split}_data_path") for split, values in own.items()}
        return found or ({"data": parse_blend(self.data_path)} if self.data_path else {})


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Options):
    """Checkpoints"""

    save: str | None = option(None, "folder to save checkpoints in", metavar="DIR")
    save_interval: int | None = option(
        None, "time between checkpoints; the end of the run is saved too", unit="iterations", minimum=1
    )
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints at multiples of this for good, and of the others the newest (or --keep-last)",
        unit="iterations",
        minimum=1,
    )
    keep_last: int | None = option(
        None,
        "ours. Keep so many of the newest checkpoints; an older one goes when the newest is verified",
        derived="all; 1 with --save-retain-interval",
        minimum=1,
    )
    async_save: bool = option(
        False, "write checkpoints beside training; a step waits only for their copy to the host's memory"
    )
    on_save_error: str = option(
        "continue",
        "ours. What a save that fails does to the run; the last one of a run must succeed",
        choices=("continue", "stop"),
    )
    load: str | None = option(
        None, "folder to resume from; it may be empty only if it is that of --save", metavar="DIR"
    )
    use_checkpoint_args: bool = option(
        False,
        "take the model's sizes from the checkpoint of --load, in place of those given; the vocabulary is the "
        "tokenizer's",
    )
    no_verify_checkpoint: bool = option(False, "ours. Load without comparing the files' hashes with the manifest's")
    ckpt_step: int | None = option(None, "iteration to load", unit="iterations", derived="the newest complete one")
    finetune: bool = option(False, "load the weights only and start at iteration 0")
    no_save_optim: bool = option(False, "leave the optimizer and the schedule out of checkpoints")
    no_load_optim: bool = option(False, "do not load the optimizer and the schedule")
    no_save_rng: bool = option(False, "accepted; there is no random state: randomness is a function of the seed")
    no_load_rng: bool = option(False, "accepted; there is no random state: randomness is a function of the seed")

    def __post_init__(self) -> None:
        super().__post_init__()
        retain, interval = self.save_retain_interval, self.save_interval
        if retain is not None and interval is not None and retain % interval:
            fail(
                "save_retain_interval",
                retain,
                f"must be a multiple of --save-interval ({interval})",
                f"{retain} / {interval} leaves {retain % interval}",
                "Nothing is saved in between that could be kept.",
            )

    @property
    def num_kept(self) -> int | None:
        """How many of the newest checkpoints are kept whatever their iteration; None: all."""
        return 1 if self.keep_last is None and self.save_retain_interval is not None else self.keep_last


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Options):
    """Logging"""

    log_interval: int = option(100, "time between log lines", unit="iterations", minimum=1)
    metrics_file: str | None = option(
        None, "ours. Losses and rates as JSON, one object a line", derived="metrics.jsonl in --save", metavar="FILE"
    )
    tensorboard_dir: str | None = option(None, "folder for TensorBoard's files", metavar="DIR")
    tensorboard_log_interval: int = option(1, "time between TensorBoard's points", unit="iterations", minimum=1)
    tensorboard_queue_size: int = option(1000, "points held before TensorBoard writes", minimum=1)
    log_params_norm: bool = option(False, "log the norm of the parameters")
    log_num_zeros_in_grad: bool = option(False, "log how many gradient elements are zero")
    log_grad_norm_by_group: bool = option(
        False, "ours. Log the norm of the gradient of what weight decay acts on, and of the rest"
    )
