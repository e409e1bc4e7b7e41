"""From lines to tokens: the work on one chunk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trimegatron.errors import DataError
from trimegatron.long_text import LongText
from trimegatron.preprocess.engine import Engine
from trimegatron.preprocess.reader import Chunk
from trimegatron.preprocess.records import LONG, BadLine, Text, parse_line, parse_long_line
from trimegatron.preprocess.sentences import SentenceSplitter

_AT_ONCE = 1 << 20  # tokens looked at: numpy makes eight bytes of each


class Encoded(NamedTuple):
    """What one key of a chunk became. Arrays, since lists of Python integers would travel between processes slowly."""

    tokens: np.ndarray  # token type [all]
    lengths: np.ndarray  # int32 [sequences], all above 0
    sequences: np.ndarray  # int32 [documents]: of each, 0 for an empty document
    text_bytes: int  # UTF-8 bytes of the texts
    used: np.ndarray  # bit per id of the vocabulary, packed: it occurs


class Reject(NamedTuple):
    """A line that was left out."""

    number: int
    reason: str
    raw: bytes


class Result(NamedTuple):
    """What a chunk became."""

    keys: list[Encoded]
    rejects: list[Reject]


class Encoder:
    """Encodes chunks. A document without any token stays empty: no sequence, no end token.

    Args:
        keys: of the JSON objects.
        engine: encodes texts.
        vocab_size: ids there are.
        dtype: the token type.
        eod: id put behind every document that has tokens, None for none.
        splitter: cuts texts into sentences.
        skip: leave bad lines out instead of raising.
    """

    def __init__(
        self,
        keys: Sequence[str],
        engine: Engine,
        vocab_size: int,
        dtype: np.dtype,
        eod: int | None,
        splitter: SentenceSplitter | None = None,
        skip: bool = False,
    ) -> None:
        self.keys, self.engine, self.vocab_size = list(keys), engine, vocab_size
        self.dtype, self.eod = dtype, eod
        self.splitter, self.skip = splitter, skip

    def __call__(self, chunk: Chunk) -> Result:
        """Raises DataError with file and line."""
        documents, numbers, rejects = self._parse(chunk)
        try:
            keys = [self._encode([document[k] for document in documents]) for k in range(len(self.keys))]
        except DataError:
            good = self._filter(chunk, documents, numbers, rejects)
            keys = [self._encode([document[k] for document in good]) for k in range(len(self.keys))]
        return Result(keys, sorted(rejects))

    def _parse(self, chunk: Chunk) -> tuple[list[list[list[Text]]], list[int], list[Reject]]:
        """Texts by document and key, the line of each document, and the lines that have none."""
        documents: list[list[list[Text]]] = []
        numbers: list[int] = []
        rejects: list[Reject] = []
        lines = chunk.take()
        lines.reverse()
        long_texts = self.engine.splits and self.splitter is None
        for number in chunk.numbers:
            raw = lines.pop()  # so that a long line does not stay beside its text
            try:
                parse = parse_long_line if long_texts and len(raw) > LONG else parse_line
                document = parse(raw, number, self.keys)
            except BadLine as error:
                self._refuse(chunk, number, str(error), raw, rejects)
                continue
            if self.splitter is not None:
                document = [[part for text in texts for part in self.splitter(str(text))] for texts in document]
            documents.append(document)
            numbers.append(number)
        return documents, numbers, rejects

    def _refuse(self, chunk: Chunk, number: int, reason: str, raw: bytes, rejects: list[Reject]) -> None:
        if not self.skip:
            raise DataError(f"{chunk.path}:{number}: {reason}") from None
        rejects.append(Reject(number, reason, raw))

    def _encode(self, documents: list[list[Text]]) -> Encoded:
        counts = [len(document) for document in documents]
        texts = [sentence for document in documents for sentence in document]
        text_bytes = sum(map(_utf8_bytes, texts))
        owners = np.repeat(np.arange(len(documents)), counts)
        tokens, lengths = self.engine.encode(texts, self.dtype)
        owners, lengths = owners[lengths > 0], lengths[lengths > 0]
        sequences = np.bincount(owners, minlength=len(documents)).astype(np.int32)
        if self.eod is not None:
            last = sequences.cumsum()[sequences > 0] - 1  # the last sequence of each document that has one
            tokens = np.insert(tokens, lengths.cumsum(dtype=np.int64)[last], self.eod)
            lengths[last] += 1
        return Encoded(tokens, lengths, sequences, text_bytes, _used(tokens, self.vocab_size))

    def _filter(
        self, chunk: Chunk, documents: list[list[list[Text]]], numbers: list[int], rejects: list[Reject]
    ) -> list[list[list[Text]]]:
        """The documents without those that the tokenizer itself refuses."""
        good = []
        for document, number in zip(documents, numbers, strict=True):
            try:
                for texts in document:
                    self.engine.encode(texts, self.dtype)
            except DataError as error:
                self._refuse(chunk, number, str(error), json.dumps(document).encode(), rejects)
            else:
                good.append(document)
        return good


def _used(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    found = np.zeros(vocab_size, bool)
    for start in range(0, len(tokens), _AT_ONCE):
        found |= np.bincount(tokens[start : start + _AT_ONCE], minlength=vocab_size) > 0
    return np.packbits(found)


def _utf8_bytes(text: Text) -> int:
    if isinstance(text, LongText):
        return text.num_bytes
    return len(text) if text.isascii() else len(text.encode())
