"""What becomes of one JSON key: its pair of files and the figures about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.data.indexed_writer import IndexedDatasetWriter, Written
from trimegatron.preprocess.encode import Encoded
from trimegatron.preprocess.shuffle import Documents, Shuffler, document_keys


@dataclass
class Counts:
    """Figures about the documents of one key, empty ones included."""

    documents: int = 0
    empty_documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest_document: int = 0  # tokens

    def add(self, encoded: Encoded) -> None:
        self.documents += len(encoded.sequences)
        self.empty_documents += int((encoded.sequences == 0).sum())
        self.sequences += len(encoded.lengths)
        self.tokens += len(encoded.tokens)
        self.text_bytes += encoded.text_bytes
        ends = np.concatenate(([0], encoded.lengths.cumsum(dtype=np.int64)))
        sizes = np.diff(ends[np.concatenate(([0], encoded.sequences.cumsum(dtype=np.int64)))])
        self.longest_document = max(self.longest_document, int(sizes.max(initial=0)))


class Output:
    """Writes what one key became and counts it.

    Args:
        prefix: of the pair.
        dtype: the token type.
        impl: the format.
        vocab_size: ids there are.
        drop_empty: documents without tokens vanish.
        folder: the working folder.
        shuffle_seed: of the order of the documents, None for that of the input.
        text_bytes: about how much JSON there will be.
        state: of an earlier run, to go on from.
    """

    def __init__(
        self,
        prefix: Path,
        dtype: np.dtype,
        impl: str,
        vocab_size: int,
        drop_empty: bool,
        folder: Path,
        shuffle_seed: int | None,
        text_bytes: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.prefix, self.drop_empty, self.shuffle_seed = prefix, drop_empty, shuffle_seed
        at = None if state is None else Written(*state["written"])
        self.writer = IndexedDatasetWriter(prefix, dtype, impl, folder=folder, at=at)
        self.counts = Counts(**state["counts"]) if state else Counts()
        self.vocab_size = vocab_size
        self.used = np.packbits(np.zeros(vocab_size, bool))
        if state:
            self.used[:] = np.frombuffer(bytes.fromhex(state["used"]), np.uint8)
        self.shuffler = None
        if shuffle_seed is not None:
            self.shuffler = Shuffler(self.writer, folder, text_bytes, state["shuffled"] if state else None)

    def add(self, encoded: Encoded) -> None:
        """Take the documents of a chunk, in the order of the input."""
        first = self.counts.documents
        self.counts.add(encoded)
        self.used |= encoded.used
        sequences = encoded.sequences
        kept = sequences > 0 if self.drop_empty else slice(None)
        if self.shuffler is None:
            self.writer.add_documents(encoded.tokens, encoded.lengths, sequences[kept])
        else:
            assert self.shuffle_seed is not None
            keys = document_keys(self.shuffle_seed, first, len(sequences))[kept]
            self.shuffler.add(Documents(keys, encoded.tokens, encoded.lengths, sequences[kept]))

    def state(self) -> dict[str, Any]:
        """What another ``Output`` goes on from; all it counts on is on the disk."""
        return {
            "written": list(self.writer.sync()),
            "shuffled": None if self.shuffler is None else self.shuffler.sync(),
            "counts": asdict(self.counts),
            "used": self.used.tobytes().hex(),
        }

    def prepare(self, metadata: dict[str, Any]) -> None:
        """Complete the files in the working folder."""
        if self.shuffler is not None:
            self.shuffler.drain()
        self.writer.metadata = {**metadata, **asdict(self.counts), "vocabulary_used": self.vocabulary_used}
        self.writer.prepare()

    @property
    def vocabulary_used(self) -> int:
        """Ids that occur."""
        return int(np.unpackbits(self.used).sum())

    def describe(self) -> str:
        """A line of figures."""
        counts = self.counts
        ratio = f"{counts.text_bytes / counts.tokens:.2f}" if counts.tokens else "n/a"
        empty = f"{counts.empty_documents:,} empty" + (", left out as in 2022" if self.drop_empty else "")
        return (
            f"{self.prefix}.bin, .idx: {counts.documents:,} documents ({empty}), {counts.tokens:,} tokens of "
            f"{self.writer.dtype.name}, {ratio} bytes of text per token, longest document "
            f"{counts.longest_document:,} tokens, {self.vocabulary_used:,} of {self.vocab_size:,} ids used"
        )
