"""``trimegatron data merge|check|show PREFIX…``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimegatron.config.flags import parse
from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.data.indexed_writer import DATASET_IMPLS
from trimegatron.errors import ConfigError
from trimegatron.preprocess.check import check, show
from trimegatron.preprocess.config import TokenizerConfig
from trimegatron.preprocess.merge import merge


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Options):
    """Merging: several sets one after another"""

    data_path: list[str] = option(REQUIRED, "prefixes of the sets, in order", metavar="PREFIX")
    output_prefix: str = option(REQUIRED, "prefix of the result")
    dataset_impl: str = option("mmap", "format of the result; the sets may have any", choices=DATASET_IMPLS)


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Options):
    """Checking: sizes, ids, ends, empty and repeated documents

    The vocabulary and the end token are those of .meta.json beside the set, unless given."""

    data_path: list[str] = option(REQUIRED, "prefixes of the sets", metavar="PREFIX")
    vocab_size: int | None = option(None, "ids must be below it", minimum=1)
    eod: int | None = option(None, "id with which every document should end")


@dataclass(frozen=True, kw_only=True)
class ShowConfig(TokenizerConfig):
    """Showing documents as text"""

    data_path: list[str] = option(REQUIRED, "prefix of the set", metavar="PREFIX")
    document: int = option(0, "number of the first document, from 0")
    count: int = option(1, "how many documents", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.data_path) != 1:
            fail("data_path", " ".join(self.data_path), "must be one set")


COMMANDS = {
    "merge": (MergeConfig, "Concatenate sets, document by document."),
    "check": (CheckConfig, "Read a set through and say what is wrong or odd."),
    "show": (ShowConfig, "Print documents back as text."),
}


def main(argv: Sequence[str]) -> int:
    """Run on ``argv``, which begins with the subcommand. Returns the exit code; errors are raised as UserError."""
    usage = f"usage: trimegatron data {{{','.join(COMMANDS)}}} PREFIX… [OPTION…]"
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join([usage, "", *(f"  {name:6} {about}" for name, (_, about) in COMMANDS.items())]))
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(f"there is no subcommand {name!r}. {usage}")
    cls, about = COMMANDS[name]
    first_option = next((k for k, word in enumerate(rest) if word.startswith("-")), len(rest))
    if first_option:
        rest = ["--data-path", *rest]
    (config,) = parse(rest, cls, prog=f"trimegatron data {name}", description=about)
    if isinstance(config, MergeConfig):
        print(merge(config.data_path, config.output_prefix, config.dataset_impl))
    elif isinstance(config, CheckConfig):
        reports = [check(prefix, config.vocab_size, config.eod) for prefix in config.data_path]
        print("\n".join(report.describe() for report in reports))
        return 3 if any(report.errors for report in reports) else 0
    else:
        for line in show(config.data_path[0], config.build(), config.document, config.count):
            print(line)
    return 0
