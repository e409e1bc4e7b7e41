"""The command line of training: Megatron-LM's ``pretrain_gpt.py`` options to a resolved, checked ``Config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimegatron.config.checkpoint_args import use_checkpoint_args
from trimegatron.config.checks import check_machine
from trimegatron.config.compat import MegatronConfig, epilog, foreign_notes
from trimegatron.config.config import GROUPS, Config
from trimegatron.config.explain import explain
from trimegatron.config.flags import Given, build, read_options, require
from trimegatron.config.options import Options, fail, kebab, option, options_of

PROG = "trimegatron train"


@dataclass(frozen=True, kw_only=True)
class CommandConfig(Options):
    """This command"""

    explain: bool = option(
        False, "print every resolved value, where it came from and the schedule's corner points, then exit"
    )
    dry_run: bool = option(
        False,
        "ours. Build one rank of each pipeline stage without memory or processes, walk through a step, print sizes and "
        "messages, then exit",
    )
    world_size: int | None = option(
        None, "ours. With --dry-run: processes of the run that is tried", unit="processes", minimum=1
    )


@dataclass(frozen=True)
class ExplainedConfig:
    """A configuration with its history."""

    config: Config
    sources: Mapping[str, str]
    """Field name → "command line" or the path of a file, for the values that were given."""
    notes: list[str]
    """What the user should know, one line each: options without effect. For rank 0 to print."""
    explain: bool
    """--explain was given: print ``text()`` and stop."""
    dry_run: bool = False
    """--dry-run was given."""

    def text(self) -> str:
        return explain(self.config, self.sources, self.notes)


def read_train_args(argv: Sequence[str], *, world_size: int) -> ExplainedConfig:
    """Read, resolve and check a training command line.

    Args:
        argv: the arguments, without the program's name.
        world_size: processes of the run, from the launcher (WORLD_SIZE).

    Raises:
        ConfigError: anything wrong, before anything is started or written.
        SystemExit: 0, after printing ``--help``.
    """
    given = read_options(
        argv,
        [CommandConfig, *GROUPS.values(), MegatronConfig],
        prog=PROG,
        description="Train a GPT. Start it with torchrun -m trimegatron.train, or with trimegatron train.",
        epilog=epilog(),
    )
    notes = foreign_notes(given.values)
    if given.values.get("use_checkpoint_args"):
        notes += use_checkpoint_args(given)
    require(list(GROUPS.values()), given.values, prog=PROG)
    dry_run = bool(given.values.get("dry_run"))
    if given.values.get("world_size") is not None:
        if not dry_run:
            fail(
                "world_size",
                given.values["world_size"],
                "needs --dry-run",
                way_out="torchrun starts a run's processes.",
            )
        world_size = given.values["world_size"]
    _check_one_length(given)
    groups: dict[str, Any] = {
        name: build(
            group,
            {field: given.values[field] for field in options_of(group) if field in given.values}
            | ({"world_size": world_size} if name == "parallel" else {}),
        )
        for name, group in GROUPS.items()
    }
    config = Config(**groups)
    notes += [f"not there, so not checked: {problem}" for problem in check_machine(config, only_note=dry_run)]
    notes += _idle_options(config, given) + _overruled(config, given)
    return ExplainedConfig(config, given.sources, notes, bool(given.values.get("explain")), dry_run)


def parse_train_args(argv: Sequence[str], *, world_size: int) -> Config:
    """The configuration alone; ``--explain`` prints and raises SystemExit(0), as ``--help`` does.

    Where many ranks read the same line, ``read_train_args`` leaves the printing, also of the notes, to one of them.
    """
    done = read_train_args(argv, world_size=world_size)
    if done.explain:
        print(done.text(), end="")
        raise SystemExit(0)
    return done.config


def _check_one_length(given: Given) -> None:
    values, sources = given.values, given.sources
    if values.get("train_iters") is not None and values.get("train_samples") is not None:
        fail(
            "train_iters",
            values["train_iters"],
            f"and --train-samples ({values['train_samples']}) exclude each other",
            f"the first is from {sources['train_iters']}, the second from {sources['train_samples']}",
            "Give one of the two.",
        )


def _idle_options(config: Config, given: Given) -> list[str]:
    """A line for each option given that does nothing in this configuration."""
    no_random_state = "randomness is a function of the seed, there is no state to save or load"
    no_board = config.logging.tensorboard_dir is None
    is_null = config.data.tokenizer_type == "NullTokenizer"
    idle: list[tuple[str, bool, str]] = [
        ("attention_softmax_in_fp32", True, "the softmax is always computed in float32"),
        ("pipeline_schedule", config.parallel.pipeline_model_parallel_size == 1, "there is one pipeline stage"),
        ("lr_warmup_init", config.schedule.warmup_samples == 0, "there is no warm-up"),
        *(
            (name, config.optimizer.lr_decay_style != "WSD", "--lr-decay-style is not WSD")
            for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        ),
        *(
            (name, not config.training.manual_gc, "there is no --manual-gc")
            for name in ("manual_gc_interval", "manual_gc_eval")
        ),
        ("save", config.training.skip_train, "--skip-train saves nothing"),
        ("tensorboard_dir", config.training.skip_train, "--skip-train writes no points"),
        ("eval_at_start", config.training.eval_iters == 0, "--eval-iters is 0"),
        *(
            (name, no_board, "there is no --tensorboard-dir")
            for name in ("tensorboard_log_interval", "tensorboard_queue_size")
        ),
        *((name, is_null, "NullTokenizer reads no file") for name in ("vocab_file", "merge_file", "tokenizer_model")),
        ("no_save_rng", True, no_random_state),
        ("no_load_rng", True, no_random_state),
        ("save_interval", config.checkpoint.save is None, "there is no --save"),
        *(
            (name, config.checkpoint.save is None, "there is no --save")
            for name in ("no_save_optim", "save_retain_interval", "keep_last", "async_save", "on_save_error")
        ),
        ("hang_timeout_in_mins", config.parallel.world_size == 1, "a single process waits for no other"),
        ("split", not config.data.data_path, "each split has its own data path"),
        *(
            (name, config.checkpoint.load is None, "there is no --load")
            for name in (
                "ckpt_step",
                "finetune",
                "no_load_optim",
                "no_verify_checkpoint",
                "override_opt_param_scheduler",
                "use_checkpoint_opt_param_scheduler",
            )
        ),
        (
            "recompute_num_layers",
            config.recompute.recompute_granularity != "full",
            "it counts layers of --recompute-granularity full",
        ),
        (
            "recompute_modules",
            config.recompute.recompute_granularity != "selective",
            "it says what --recompute-granularity selective replays",
        ),
        *(
            (name, not config.precision.fp16, "only --fp16 scales the loss")
            for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        ),
    ]
    return [
        f"{kebab(name)} has no effect: {reason}."
        for name, condition, reason in idle
        if condition and given.values.get(name) not in (None, False)
    ]


def _overruled(config: Config, given: Given) -> list[str]:
    """A line for each value given that another option changed, such as float32 gradients with --bf16."""
    notes = []
    for name, group in GROUPS.items():
        for field in options_of(group):
            value, resolved = given.values.get(field), getattr(getattr(config, name), field)
            if value is not None and value != resolved:
                notes.append(f"{kebab(field)} ({value}) became {resolved}: other options ask for it.")
    return notes
