"""Which tokenizer a converted run has: the one named on the command line, the folder's own, or ids as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimegatron.config.options import Options, fail, option
from trimegatron.errors import ConfigError
from trimegatron.tokenizer import NullTokenizer, Tokenizer, build_tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(Options):
    """Tokenizer and vocabulary"""

    vocab_file: str | None = option(None, "vocab.json of GPT2BPETokenizer", metavar="FILE", flags=("--vocab",))
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer", metavar="FILE", flags=("--merge",))
    tokenizer_model: str | None = option(None, "folder or tokenizer.json of HuggingFaceTokenizer", metavar="PATH")
    true_vocab_size: int | None = option(
        None,
        "words without padding; without a tokenizer the ids are text and the last one ends a document",
        derived="from the tokenizer",
        minimum=1,
    )


def find_tokenizer(files: VocabularyConfig, folder: Path, *, where: Path) -> Tokenizer:
    """The tokenizer of the model ``where``, whose own would lie in ``folder``.

    Raises:
        ConfigError: there is none, or it is not of the size that ``--true-vocab-size`` says.
    """
    tokenizer = _find(files, folder)
    size = files.true_vocab_size
    if tokenizer is None and size is None:
        raise ConfigError(
            f"{where} comes without a tokenizer. Give --vocab-file and --merge-file, --tokenizer-model, or "
            "--true-vocab-size alone to go on with ids as text"
        )
    if tokenizer is None:
        assert size is not None
        return NullTokenizer(size - 1)
    if size not in (None, tokenizer.vocab_size):
        fail(
            "true_vocab_size",
            size,
            f"must be that of the tokenizer ({tokenizer.vocab_size})",
            way_out="Leave it out, or give the tokenizer of this model.",
        )
    return tokenizer


def _find(files: VocabularyConfig, folder: Path) -> Tokenizer | None:
    if files.tokenizer_model is not None:
        return build_tokenizer("HuggingFaceTokenizer", tokenizer_model=files.tokenizer_model)
    if files.vocab_file is not None or files.merge_file is not None:
        return build_tokenizer("GPT2BPETokenizer", vocab_file=files.vocab_file, merge_file=files.merge_file)
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(folder)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return build_tokenizer("GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt")
    if (folder / "tokenizer.json").is_file():
        return build_tokenizer("HuggingFaceTokenizer", tokenizer_model=folder)
    return None
