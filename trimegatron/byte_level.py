"""GPT-2's byte-level BPE through the ``tokenizers`` library, which is imported when one of these is called."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimegatron.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"

_WORD_END = re.compile(r"[!-~](?=[ \n])")


def byte_level(model: Any) -> Any:
    """A ``tokenizers.Tokenizer`` that cuts text as GPT-2 does: no normalisation, no space put in front."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def from_vocab(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """A whole GPT-2 tokenizer. ``<|endoftext|>``, where the vocabulary has it, is a special token."""
    from tokenizers import AddedToken, models

    backend = byte_level(models.BPE(vocab, merges))
    if END_OF_TEXT in vocab:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def from_files(vocab_file: Path, merge_file: Path) -> Any:
    """``from_vocab`` of vocab.json and merges.txt. Raises ConfigError."""
    from tokenizers import models

    files = f"{vocab_file} and {merge_file}"
    vocab, merges = attempt(lambda: models.BPE.read_file(str(vocab_file), str(merge_file)), files)
    missing = 256 - sum(symbol in vocab for symbol in alphabet())
    if missing:
        # The library would drop such bytes from the text without a word.
        raise ConfigError(
            f"{vocab_file}: {missing} of the 256 byte symbols are missing; this is not a byte-level vocabulary"
        )
    return attempt(lambda: from_vocab(vocab, merges), files)


def alphabet() -> list[str]:
    """The 256 characters that stand for the bytes in a byte-level vocabulary."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def attempt(make: Callable[[], Any], what: str) -> Any:
    """``make()``; what the library raises, plain Exceptions without a file name, as a ConfigError about ``what``."""
    try:
        return make()
    except Exception as error:
        raise ConfigError(f"{what}: cannot be read as a tokenizer ({error})") from error


def split_long(text: str, size: int) -> Iterator[str]:
    """A text in pieces of about ``size`` characters whose tokens together are the tokens of the text.

    Exact for GPT-2's rule alone: there no word reaches over a blank that follows a visible character, and what comes
    after such a place does not depend on what comes before it.
    """
    start = 0
    while len(text) - start > size and (place := _WORD_END.search(text, start + size)):
        yield text[start : place.end()]
        start = place.end()
    yield text[start:] if start else text
