"""``trimegatron convert to-hf``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimegatron.config.flags import parse
from trimegatron.config.options import REQUIRED, Options, option
from trimegatron.errors import ConfigError

FORMS = ("to-hf",)


@dataclass(frozen=True, kw_only=True)
class ToHfConfig(Options):
    """Conversion to Hugging Face"""

    load: str = option(REQUIRED, "folder that a run saved into, or that of one checkpoint")
    output: str = option(REQUIRED, "folder to write; it must not exist yet, or be empty")
    dtype: str | None = option(
        None, "precision of the written weights", derived="the run's own", choices=("float32", "bfloat16", "float16")
    )
    verify: bool = option(True, "do not compare the written model with the checkpoint")


def main(argv: list[str]) -> int:
    """Convert, and print the proof."""
    if not argv or argv[0] not in (*FORMS, "-h", "--help"):
        got = f"got {argv[0]!r}" if argv else "got nothing"
        raise ConfigError(f"trimegatron convert needs what to convert to, {got}. Forms: {', '.join(FORMS)}")
    if argv[0] in ("-h", "--help"):
        print("usage: trimegatron convert to-hf --load DIR --output DIR [OPTION…]")
        return 0
    (config,) = parse(argv[1:], ToHfConfig, prog="trimegatron convert to-hf", description=__doc__ or "")
    from trimegatron.convert.to_hf import convert_to_hf  # torch is loaded only once the command is right

    proof = convert_to_hf(Path(config.load), Path(config.output), dtype=config.dtype, verify=config.verify)
    print(f"wrote {config.output}")
    print(f"proof: {proof}" if proof is not None else "not verified (--no-verify)")
    return 0
