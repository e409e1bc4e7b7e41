"""``trimegatron convert``: between our checkpoints, Hugging Face's models and Megatron-LM's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimegatron.config.flags import parse
from trimegatron.config.options import REQUIRED, Options, option
from trimegatron.errors import CheckpointError, ConfigError, unwind_on_sigterm

if TYPE_CHECKING:
    from trimegatron.convert.source import Source
    from trimegatron.convert.vocabulary import VocabularyConfig


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Options):
    """Source"""

    load: str = option(REQUIRED, "folder that a run saved into, or that of one checkpoint", metavar="DIR")
    ckpt_step: int | None = option(None, "iteration to convert", unit="iterations", derived="the newest complete one")


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(Options):
    """A source of Megatron-LM's"""

    mask_padded_vocab: bool = option(
        True, "keep the padding of the vocabulary as words, which is how Megatron-LM computes; train on with it too"
    )


@dataclass(frozen=True, kw_only=True)
class ToHfConfig(Options):
    """Conversion to Hugging Face"""

    output: str = option(REQUIRED, "folder to write; it must not exist yet, or be empty", metavar="DIR")
    dtype: str | None = option(
        None, "precision of the written weights", derived="the run's own", choices=("float32", "bfloat16", "float16")
    )
    format: str = option("safetensors", "bin is pytorch_model.bin, a pickle", choices=("safetensors", "bin"))
    max_shard_size: str = option("5GB", "begin another file at this size", metavar="SIZE")
    verify: bool = option(True, "neither look for damage nor compare the written model with its source")
    push_to_hub: str | None = option(
        None, "upload to this model repository at the end (a new one is private)", metavar="OWNER/NAME"
    )


@dataclass(frozen=True, kw_only=True)
class FromHfConfig(Options):
    """Conversion from Hugging Face"""

    model: str = option(REQUIRED, "folder of a GPT-2 model with config.json", metavar="DIR")
    save: str = option(REQUIRED, "folder to write; it must not exist yet, or be empty", metavar="DIR")
    verify: bool = option(True, "do not compare the written checkpoint with the model")


@dataclass(frozen=True, kw_only=True)
class FromMegatronConfig(Options):
    """Conversion from Megatron-LM"""

    save: str = option(REQUIRED, "folder to write; it must not exist yet, or be empty", metavar="DIR")
    no_load_optim: bool = option(False, "leave the optimizer's state out")
    verify: bool = option(True, "do not read the written checkpoint back")


@dataclass(frozen=True, kw_only=True)
class ToMegatronConfig(Options):
    """Conversion to Megatron-LM"""

    save: str = option(REQUIRED, "folder to write; it must not exist yet, or be empty", metavar="DIR")
    target_tensor_parallel_size: int = option(1, "ranks that share one layer", unit="ranks", minimum=1)
    target_pipeline_parallel_size: int = option(1, "stages that share the layers", unit="ranks", minimum=1)
    no_save_optim: bool = option(False, "leave the optimizer's state out")
    verify: bool = option(True, "do not read the written checkpoint back")


def main(argv: list[str]) -> int:
    """Convert, and print the proof."""
    if not argv or argv[0] not in (*FORMS, "-h", "--help"):
        got = f"got {argv[0]!r}" if argv else "got nothing"
        raise ConfigError(f"trimegatron convert needs what to convert to, {got}. Forms: {', '.join(FORMS)}")
    if argv[0] in ("-h", "--help"):
        print("usage: trimegatron convert FORM [OPTION…]\n")
        for name, (_, what) in FORMS.items():
            print(f"  {name:14} {what}")
        print("\ntrimegatron convert FORM --help lists the options of a form.")
        return 0
    unwind_on_sigterm("convert")
    try:
        FORMS[argv[0]][0](argv[1:])
    except OSError as error:  # a file that ends or vanishes while it is read, or a full disk
        raise CheckpointError(f"the conversion failed and left nothing behind: {error}") from error
    return 0


def to_hf(argv: list[str]) -> None:
    """A training checkpoint of ours or Megatron-LM's, of any layout, to a Hugging Face model, with proof."""
    from trimegatron.convert.vocabulary import VocabularyConfig

    source_config, config, vocabulary, megatron = parse(
        argv,
        SourceConfig,
        ToHfConfig,
        VocabularyConfig,
        MegatronConfig,
        prog="trimegatron convert to-hf",
        description=to_hf.__doc__ or "",
    )
    from trimegatron.convert.hub import check_hub, push_to_hub
    from trimegatron.convert.shards import parse_size
    from trimegatron.convert.to_hf import write_hf  # torch is loaded only once the command is right

    max_shard_bytes = parse_size(config.max_shard_size)
    if config.push_to_hub is not None:
        check_hub()
    proof = write_hf(
        open_source(source_config, vocabulary, megatron),
        Path(config.output),
        dtype=config.dtype,
        format=config.format,
        max_shard_bytes=max_shard_bytes,
        verify=config.verify,
    )
    print(f"wrote {config.output}")
    print(f"proof: {proof}" if proof is not None else "not verified (--no-verify)")
    if config.push_to_hub is not None:
        print(f"uploaded to {push_to_hub(Path(config.output), config.push_to_hub)}")


def from_hf(argv: list[str]) -> None:
    """A local GPT-2 model of Hugging Face's to a checkpoint, to train on with --load DIR --finetune at any layout."""
    from trimegatron.convert.vocabulary import VocabularyConfig

    config, vocabulary = parse(
        argv, FromHfConfig, VocabularyConfig, prog="trimegatron convert from-hf", description=from_hf.__doc__ or ""
    )
    from trimegatron.convert.from_hf import convert_from_hf

    proof = convert_from_hf(Path(config.model), Path(config.save), vocabulary, verify=config.verify)
    print(f"wrote {config.save}; train on with --load {config.save} --finetune")
    print(f"proof: {proof}" if proof is not None else "not verified (--no-verify)")


def from_megatron(argv: list[str]) -> None:
    """A checkpoint of Megatron-LM's, of any layout, to one that training goes on from with --load."""
    from trimegatron.convert.vocabulary import VocabularyConfig

    source_config, config, vocabulary, megatron = parse(
        argv,
        SourceConfig,
        FromMegatronConfig,
        VocabularyConfig,
        MegatronConfig,
        prog="trimegatron convert from-megatron",
        description=from_megatron.__doc__ or "",
    )
    from trimegatron.convert.from_megatron import read_megatron
    from trimegatron.convert.to_ours import write_checkpoint

    source = read_megatron(
        Path(source_config.load),
        vocabulary,
        ckpt_step=source_config.ckpt_step,
        mask_padded_vocab=megatron.mask_padded_vocab,
        with_optimizer=not config.no_load_optim,
    )
    report(source, config.save, write_checkpoint(source, Path(config.save), verify=config.verify))


def to_megatron(argv: list[str]) -> None:
    """A checkpoint to Megatron-LM's form of 2022, at any layout; the files are pickles, as it wants them."""
    source_config, config = parse(
        argv,
        SourceConfig,
        ToMegatronConfig,
        prog="trimegatron convert to-megatron",
        description=to_megatron.__doc__ or "",
    )
    from trimegatron.convert.to_megatron import write_megatron

    source = open_source(source_config, None, None)
    count = write_megatron(
        source.without_optimizer() if config.no_save_optim else source,
        Path(config.save),
        tp=config.target_tensor_parallel_size,
        pp=config.target_pipeline_parallel_size,
        verify=config.verify,
    )
    report(source, config.save, count)
    print("load it with --no-load-rng: a run of ours has no random state")


def open_source(config: SourceConfig, vocabulary: VocabularyConfig | None, megatron: MegatronConfig | None) -> Source:
    """The checkpoint of either kind that ``--load`` means.

    Raises:
        ConfigError: an option is given that a checkpoint of ours answers itself.
    """
    from trimegatron.convert.source import read_checkpoint

    load = Path(config.load)
    if vocabulary is not None and megatron is not None:
        from trimegatron.convert.from_megatron import read_megatron
        from trimegatron.convert.megatron_files import is_megatron

        if is_megatron(load):
            return read_megatron(
                load,
                vocabulary,
                ckpt_step=config.ckpt_step,
                mask_padded_vocab=megatron.mask_padded_vocab,
                with_optimizer=False,
            )
        if vocabulary != type(vocabulary)() or megatron != MegatronConfig():
            raise ConfigError(
                f"--load ({load}) is a checkpoint of trimegatron's, which has its own tokenizer. Leave out the options "
                "about tokenizer and vocabulary"
            )
    return read_checkpoint(load, config.ckpt_step)


def report(source: Source, save: str, count: int | None) -> None:
    for note in source.notes:
        print(f"note: {note}")
    tensors = sum(map(len, source.tensors.values()))
    print(f"wrote {save}: iteration {source.state.progress.iteration}, {tensors} tensors")
    print(f"proof: {count} tensors read back, bit for bit" if count is not None else "not verified (--no-verify)")


FORMS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "to-hf": (to_hf, "a training checkpoint to a Hugging Face model"),
    "from-hf": (from_hf, "a Hugging Face model to a training checkpoint"),
    "from-megatron": (from_megatron, "a checkpoint of Megatron-LM's to one of ours"),
    "to-megatron": (to_megatron, "a checkpoint of ours to one of Megatron-LM's"),
}
"""Form → (function, what it does)."""
