"""``trimegatron SUBCOMMAND``. Each subcommand is a ``main(argv) -> exit code``, imported when it is called."""

from __future__ import annotations

import sys
from importlib import import_module

import trimegatron
from trimegatron.errors import UserError, complain

COMMANDS = {
    "demo": ("trimegatron.demo", "the whole workflow on this machine, with no download"),
    "tokenizer": ("trimegatron.preprocess.tokenizer_cli", "train a byte-level BPE tokenizer"),
    "preprocess": ("trimegatron.preprocess.cli", "loose JSON to the .bin and .idx files that training reads"),
    "data": ("trimegatron.preprocess.data_cli", "merge and check sets of tokens, print documents back as text"),
    "train": ("trimegatron.launch", "train, in one process or several"),
    "generate": ("trimegatron.generate", "text from a training checkpoint"),
    "checkpoint": (
        "trimegatron.checkpoint.cli",
        "list, verify and compare checkpoints; prove that a run resumes exactly",
    ),
    "convert": ("trimegatron.convert.cli", "checkpoints to and from Hugging Face and Megatron-LM, with proof"),
    "tune": ("trimegatron.bench.tune", "find the kernels' launch configurations on this GPU"),
    "bench": ("trimegatron.bench.cli", "comparisons with other software, on this machine"),
}
"""Name → (module, what it does)."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (docs/interface.md)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name == "--version":
        print(f"trimegatron {trimegatron.__version__}")
        return 0
    if name not in COMMANDS:
        print(f"trimegatron: error: there is no command {name!r}. Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return import_module(COMMANDS[name][0]).main(rest)
    except (UserError, OSError) as error:
        complain(name, str(error))
        return error.exit_code if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        complain(name, "interrupted", is_error=False)
        return 130


def usage() -> str:
    lines = ["usage: trimegatron COMMAND [OPTION…]", "", "Megatron-LM's GPT pretraining, rebuilt on Triton.", ""]
    lines += [f"  {name:12} {what}" for name, (_, what) in COMMANDS.items()]
    lines += ["", "trimegatron COMMAND --help lists the options of a command."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
