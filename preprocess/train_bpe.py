"""Training a byte-level BPE tokenizer on the texts of loose JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimegatron import byte_level
from trimegatron.byte_level import END_OF_TEXT
from trimegatron.errors import ConfigError, DataError
from trimegatron.preprocess.inputs import Source, find_sources
from trimegatron.preprocess.reader import read_chunks
from trimegatron.preprocess.records import BadLine, parse_line
from trimegatron.tokenizer import BPETokenizer

_BYTES = 256


def train_bpe(
    files: Sequence[str | Path], json_keys: Sequence[str], vocab_size: int, output: str | Path
) -> BPETokenizer:
    """Learn merges from ``json_keys`` of ``files`` and write vocab.json, merges.txt, tokenizer.json (and its config).

    The ids are GPT-2's in kind: the 256 bytes, then the merges, and ``<|endoftext|>`` last. A small text may not have
    enough pairs for ``vocab_size``; then the vocabulary is what there is, and a line says so. The same input gives
    the same files.

    Args:
        files: names, globs and folders; one JSON object a line, packed or not; read as a stream.
        json_keys: whose values are learnt from.
        vocab_size: ids in all, at least 257.
        output: a folder, made when missing.

    Raises:
        ConfigError: vocabulary too small, file missing.
        DataError: a line that cannot be used.
    """
    from tokenizers import models, trainers

    if vocab_size < _BYTES + 1:
        raise ConfigError(f"--vocab-size ({vocab_size}) must be at least {_BYTES + 1}: 256 bytes and {END_OF_TEXT}")
    sources = find_sources([str(file) for file in files])
    backend = byte_level.byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        show_progress=False,
        initial_alphabet=byte_level.alphabet(),
    )
    texts = _Texts(sources, json_keys)
    try:
        backend.train_from_iterator(iter(texts), trainer)
    except Exception:
        if texts.error is not None:
            raise texts.error from None
        raise
    learnt = json.loads(backend.to_str())["model"]
    vocab = learnt["vocab"]
    vocab[END_OF_TEXT] = len(vocab)
    if len(vocab) < vocab_size:
        print(f"The text gives {len(vocab)} ids, not --vocab-size {vocab_size}; going on with {len(vocab)}.")
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learnt["merges"]]
    tokenizer = BPETokenizer(byte_level.from_vocab(vocab, merges), "GPT2BPETokenizer", END_OF_TEXT, {})
    tokenizer.save(output)
    return tokenizer


class _Texts:
    """Texts one by one; keeps the DataError that ended them, which the library wraps in its own."""

    def __init__(self, sources: list[Source], keys: Sequence[str]) -> None:
        self.sources, self.keys = sources, keys
        self.error: DataError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for chunk in read_chunks(self.sources):
                for number, raw in zip(chunk.numbers, chunk.take(), strict=True):
                    try:
                        texts = parse_line(raw, number, self.keys)
                    except BadLine as error:
                        raise DataError(f"{chunk.path}:{number}: {error}") from None
                    for sentences in texts:
                        yield from map(str, sentences)
        except DataError as error:
            self.error = error
            raise
