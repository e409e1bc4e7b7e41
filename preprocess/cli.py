"""``trimegatron preprocess``."""

from __future__ import annotations

from collections.abc import Sequence

from trimegatron.config.flags import parse
from trimegatron.errors import unwind_on_sigterm
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.run import run, say


def main(argv: Sequence[str]) -> int:
    """Run on ``argv`` (without the program's name). Returns the exit code; errors are raised as UserError."""
    (config,) = parse(
        argv,
        PreprocessConfig,
        prog="trimegatron preprocess",
        description="Tokenize loose JSON into the .bin and .idx files that training reads.",
    )
    if config.chunk_size is not None:
        say(f"--chunk-size ({config.chunk_size}) has no effect: about a megabyte of lines is handed over at a time.")
    unwind_on_sigterm()  # the run itself says what can be continued
    print(run(config).describe())
    return 0
