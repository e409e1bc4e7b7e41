"""``trimegatron tokenizer train``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimegatron.config.flags import parse
from trimegatron.config.options import REQUIRED, Options, option
from trimegatron.errors import ConfigError
from trimegatron.preprocess.train_bpe import train_bpe


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainConfig(Options):
    """Training a tokenizer: byte-level BPE, as GPT-2's

    Writes vocab.json, merges.txt, tokenizer.json and tokenizer_config.json."""

    input: list[str] = option(REQUIRED, "JSON files with one object a line, UTF-8")
    json_keys: list[str] = option(["text"], "keys whose values are learnt from")
    vocab_size: int = option(REQUIRED, "ids in all, <|endoftext|> (the last one) included", minimum=257)
    output: str = option(REQUIRED, "folder for the files")


def main(argv: Sequence[str]) -> int:
    """Run on ``argv`` (which may begin with ``train``). Returns the exit code; errors are raised as UserError."""
    argv = list(argv)
    if argv and not argv[0].startswith("-"):
        if argv[0] != "train":
            raise ConfigError(f"trimegatron tokenizer {argv[0]}: the only subcommand is train")
        argv = argv[1:]
    (config,) = parse(
        argv,
        TokenizerTrainConfig,
        prog="trimegatron tokenizer train",
        description="Learn a byte-level BPE vocabulary from loose JSON.",
    )
    tokenizer = train_bpe(config.input, config.json_keys, config.vocab_size, config.output)
    print(f"{config.output}: {tokenizer.vocab_size:,} ids, end of document {tokenizer.eod}")
    return 0
