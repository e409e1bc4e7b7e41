"""``trimegatron checkpoint list|verify|diff DIR…`` and ``trimegatron checkpoint resume-check FLAGS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trimegatron.config.flags import parse
from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ListConfig(Options):
    """What is there"""

    load: list[str] = option(REQUIRED, "folders that runs saved into, or single checkpoints", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Options):
    """Is it whole

    Sizes and hashes of all files, and that the pieces of every tensor of the model cover it. Exit code 4 where they
    do not."""

    load: list[str] = option(REQUIRED, "folders that runs saved into, or single checkpoints", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class DiffConfig(Options):
    """What differs

    Tensors to the bit, how far the runs are, their data and their loss scale decide the exit code: 0 where all is
    equal, 1 where something differs. Settings and versions are shown only."""

    load: list[str] = option(
        REQUIRED, "two checkpoints, or folders that runs saved into: the newest complete one of each", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.load) != 2:
            fail("load", " ".join(self.load), "must be two folders")


def run_list(config: ListConfig) -> int:
    from trimegatron.checkpoint.listing import table

    for root in config.load:
        print(table(Path(root)))
    return 0


def run_verify(config: VerifyConfig) -> int:
    from trimegatron.checkpoint.contents import faults
    from trimegatron.checkpoint.listing import checkpoints_of

    is_whole = True
    for root in config.load:
        for folder in checkpoints_of(Path(root)):
            found = list(faults(folder))
            is_whole = is_whole and not found
            print("\n".join(f"{folder}: {fault}" for fault in found) if found else f"{folder}: whole", flush=True)
    return 0 if is_whole else 4


def run_diff(config: DiffConfig) -> int:
    from trimegatron.checkpoint.compare import differences, setting_differences
    from trimegatron.checkpoint.directory import require_checkpoint

    one, other = (require_checkpoint(Path(root)) for root in config.load)
    print(f"{one} and {other}")
    for line in setting_differences(one, other):
        print(f"  {line}")
    is_equal = True
    for line in differences(one, other):
        is_equal = False
        print(f"  {line}", flush=True)
    print("equal to the bit" if is_equal else "they differ")
    return 0 if is_equal else 1


COMMANDS: dict[str, tuple[type[Options], Callable[..., int], str]] = {
    "list": (ListConfig, run_list, "What checkpoints are there, of what run, and which can be used."),
    "verify": (VerifyConfig, run_verify, "Read checkpoints through and say what is damaged or missing."),
    "diff": (DiffConfig, run_diff, "Compare two checkpoints, of whatever layouts, to the bit."),
}


RESUME_CHECK = "Prove that a run with these flags of training, killed and resumed, is the one never stopped."


def main(argv: list[str]) -> int:
    """Run one subcommand; returns the exit code."""
    usage = f"usage: trimegatron checkpoint {{{','.join(COMMANDS)}}} DIR…, or resume-check FLAGS"
    if argv and argv[0] == "resume-check":
        from trimegatron.checkpoint import resume_check

        return resume_check.main(argv[1:])
    if not argv or argv[0] in ("-h", "--help"):
        abouts = {name: about for name, (_, _, about) in COMMANDS.items()} | {"resume-check": RESUME_CHECK}
        print("\n".join([usage, "", *(f"  {name:12} {about}" for name, about in abouts.items())]))
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(f"there is no subcommand {name!r}. {usage}")
    cls, run, about = COMMANDS[name]
    if rest and not rest[0].startswith("-"):
        rest = ["--load", *rest]
    (config,) = parse(rest, cls, prog=f"trimegatron checkpoint {name}", description=about)
    return run(config)
