"""``trimegatron data check`` and ``show``: is a set sound, and what does it say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.metadata import read_metadata
from trimegatron.errors import DataError
from trimegatron.preprocess.merge import tokens_of
from trimegatron.tokenizer import Tokenizer

_SHOWN = 5  # examples named of each finding


@dataclass
class Report:
    """What ``check`` found. ``errors`` make a set unusable; ``notes`` are worth knowing."""

    prefix: str
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """All of it, a line each."""
        verdict = "unusable" if self.errors else "sound"
        return "\n".join(
            [f"{self.prefix}: {verdict}", *(f"  {line}" for line in self.lines)]
            + [f"  error: {line}" for line in self.errors]
            + [f"  note: {line}" for line in self.notes]
        )


class _Documents:
    """How many there are, and the first of them; shown as ``3 documents (7, 9, 11)``."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[int] = []

    def add(self, document: int) -> None:
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(document)

    def __str__(self) -> str:
        more = ", …" if self.count > _SHOWN else ""
        return f"{self.count:,} documents ({', '.join(map(str, self.first))}{more})"


def check(prefix: str, vocab_size: int | None = None, eod: int | None = None) -> Report:
    """Read all of a set: sizes of the pair, ids against the vocabulary, ends, empty and repeated documents.

    Args:
        prefix: of the pair.
        vocab_size: ids must be below it; that of ``.meta.json`` when not given.
        eod: with which every document should end; that of ``.meta.json`` when not given.
    """
    report = Report(prefix)
    try:
        data, made = IndexedDataset(prefix), read_metadata(prefix)
    except DataError as error:
        report.errors.append(str(error))
        return report
    vocab_size = vocab_size if vocab_size is not None else made.get("vocab_size")
    eod = eod if eod is not None or not made.get("append_eod") else made.get("eod")
    documents = len(data.document_indices) - 1
    compat = made.get("megatron_compat")
    report.lines.append(
        f"{documents:,} documents, {len(data):,} sequences, {data.num_tokens:,} tokens of {data.dtype.name}"
        + (f", made by Megatron's rules of {compat}" if compat else "")
    )
    digests = np.zeros(documents, np.uint64)
    empty, outside, endless, repeated = _Documents(), _Documents(), _Documents(), _Documents()
    largest = -1
    for k, tokens in _documents(data):
        if not len(tokens):
            empty.add(k)
            continue
        largest = max(largest, int(tokens.max()))
        if int(tokens.min()) < 0 or (vocab_size is not None and int(tokens.max()) >= vocab_size):
            outside.add(k)
        if eod is not None and tokens[-1] != eod:
            endless.add(k)
        digests[k] = int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()) or 1
    order = digests.argsort(kind="stable")
    again = (digests[order][1:] == digests[order][:-1]) & (digests[order][1:] != 0)  # 0: empty
    for k in np.sort(order[1:][again]).tolist():
        repeated.add(k)
    if vocab_size is None:
        report.notes.append(f"largest id {largest}; give --vocab-size, or a tokenizer, to check it")
    if outside.count:
        report.errors.append(f"ids outside the vocabulary 0..{(vocab_size or 0) - 1} in {outside}")
    if empty.count:
        report.notes.append(f"no tokens in {empty}")
    if endless.count:
        report.notes.append(f"no end token {eod} at the end of {endless}")
    if repeated.count:
        report.notes.append(f"the same as an earlier document: {repeated}")
    return report


def show(prefix: str, tokenizer: Tokenizer, first: int, count: int) -> Iterator[str]:
    """Documents as text, each under a line with its number and size. Raises DataError."""
    data = IndexedDataset(prefix)
    documents = len(data.document_indices) - 1
    if not 0 <= first < documents:
        raise DataError(f"{prefix}: there is no document {first}; there are {documents:,}, counted from 0")
    for k in range(first, min(documents, first + count)):
        start, stop = data.document_indices[k : k + 2].tolist()
        tokens = tokens_of(data, start, stop)
        yield f"--- document {k}: {stop - start} sequences, {len(tokens):,} tokens"
        yield tokenizer.decode(tokens.tolist())


def _documents(data: IndexedDataset) -> Iterator[tuple[int, np.ndarray]]:
    for k in range(len(data.document_indices) - 1):
        yield k, tokens_of(data, int(data.document_indices[k]), int(data.document_indices[k + 1]))
