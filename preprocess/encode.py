"""From lines to tokens: the work of one process on one chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimegatron.errors import DataError
from trimegatron.preprocess.reader import Chunk, parse_line
from trimegatron.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """What one key of a chunk became. Arrays, since lists of Python integers would travel between processes slowly."""

    tokens: np.ndarray  # token type [all]
    lengths: np.ndarray  # int32 [sequences], all above 0
    sequences: np.ndarray  # int32 [documents]: of each, 0 for an empty document
    text_bytes: int  # UTF-8 bytes of the texts


class Encoder:
    """Encodes chunks of one file. A document without any token stays empty: no sequence, no end token."""

    def __init__(
        self, path: Path, keys: Sequence[str], tokenizer: Tokenizer, dtype: np.dtype, append_eod: bool
    ) -> None:
        self.path, self.keys, self.tokenizer, self.dtype = path, list(keys), tokenizer, dtype
        self.eod = tokenizer.eod if append_eod else None

    def __call__(self, chunk: Chunk) -> list[Encoded]:
        """One result per key. Raises DataError with file and line."""
        numbers = range(chunk.first_line, chunk.last_line + 1)
        documents = [
            parse_line(raw, self.path, number, self.keys) for number, raw in zip(numbers, chunk.lines, strict=True)
        ]
        return [self._encode([d[k] for d in documents], chunk.first_line) for k in range(len(self.keys))]

    def _encode(self, documents: list[list[str]], first_line: int) -> Encoded:
        texts = [sentence for document in documents for sentence in document]
        owners = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
        try:
            tokens, lengths = self.tokenizer.encode_flat(texts)
        except DataError:
            self._locate(texts, owners + first_line)
            raise
        owners, lengths = owners[lengths > 0], lengths[lengths > 0]
        sequences = np.bincount(owners, minlength=len(documents)).astype(np.int32)
        if self.eod is not None:
            last = sequences.cumsum()[sequences > 0] - 1  # the last sequence of each document that has one
            tokens = np.insert(tokens, lengths.cumsum()[last], self.eod)
            lengths[last] += 1
        return Encoded(tokens.astype(self.dtype), lengths, sequences, sum(len(text.encode()) for text in texts))

    def _locate(self, texts: list[str], lines: np.ndarray) -> None:
        """Raise again what the tokenizer raised, with the line."""
        for text, line in zip(texts, lines.tolist(), strict=True):
            try:
                self.tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"{self.path}:{line}: {error}") from None
