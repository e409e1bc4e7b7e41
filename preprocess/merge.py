"""``trimegatron data merge``: several sets one after another, document by document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.data.metadata import read_metadata
from trimegatron.errors import ConfigError

_TOKENS = 1 << 22  # copied at a time
_DOCUMENTS = 1 << 18
_AGREE = ("megatron_compat", "tokenizer_type", "tokenizer_sha256", "vocab_size", "eod", "append_eod", "level")
_SUM = ("documents", "empty_documents", "sequences", "tokens", "text_bytes")


def merge(prefixes: Sequence[str], output_prefix: str, impl: str) -> str:
    """Write the documents of all sets, in order, into one. Returns a line about it.

    The token type is the smallest that holds those of all sets.

    Raises:
        ConfigError: the output is one of the inputs, or the sets say that they were made with different tokenizers or
            rules.
        DataError: a set cannot be read, or ids do not fit int32, the only type of ``lazy`` and ``cached``.
    """
    if any(Path(prefix).resolve() == Path(output_prefix).resolve() for prefix in prefixes):
        raise ConfigError(f"--output-prefix ({output_prefix}) is one of the sets to merge; choose another.")
    metadata = _merged_metadata(prefixes)
    sets = [IndexedDataset(prefix) for prefix in prefixes]
    dtype = np.result_type(*(data.dtype for data in sets)).newbyteorder("<") if impl == "mmap" else np.dtype("<i4")
    with IndexedDatasetWriter(output_prefix, dtype, impl) as writer:
        for data in sets:
            for start, stop in _ranges(data):
                first, last = data.document_indices[[start, stop]].tolist()
                sequences = np.diff(data.document_indices[start : stop + 1])
                writer.add_documents(tokens_of(data, first, last), data.sizes[first:last], sequences)
        written = writer.written
        if metadata:
            writer.metadata = {**metadata, "dtype": dtype.name, "dataset_impl": impl}
    return (
        f"{output_prefix}.bin, .idx: {written.documents:,} documents, {written.sequences:,} sequences, "
        f"{written.tokens:,} tokens of {dtype.name} from {len(sets)} sets"
    )


def _ranges(data: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Ranges of documents, each of about ``_TOKENS`` tokens, or one larger document."""
    ends = np.concatenate(([0], data.sizes.cumsum(dtype=np.int64)))[data.document_indices]
    start = 0
    while start < len(ends) - 1:
        stop = int(np.searchsorted(ends, ends[start] + _TOKENS, "right")) - 1
        stop = min(max(stop, start + 1), start + _DOCUMENTS)
        yield start, stop
        start = stop


def tokens_of(data: IndexedDataset, first: int, last: int) -> np.ndarray:
    """The tokens of the sequences [first, last) as one array."""
    return np.concatenate([np.empty(0, data.dtype), *(data.get(k) for k in range(first, last))])


def _merged_metadata(prefixes: Sequence[str]) -> dict[str, Any]:
    """What holds of all sets: what they agree on and the sums of what can be summed; nothing if one says nothing."""
    found = [read_metadata(prefix) for prefix in prefixes]
    for (prefix, one), (other_prefix, other) in pairwise(zip(prefixes, found, strict=True)):
        for name in _AGREE:
            if one and other and one.get(name) != other.get(name):
                raise ConfigError(
                    f"{prefix} and {other_prefix} were made with different {name}: {one.get(name)} and "
                    f"{other.get(name)}. One set needs one tokenizer and one rule; to merge all the same, remove "
                    "their .meta.json files."
                )
    if not all(found):
        return {}
    sums = {name: sum(one.get(name, 0) for one in found) for name in _SUM}
    longest = max(one.get("longest_document", 0) for one in found)
    names = [{"name": Path(prefix).name} for prefix in prefixes]
    return {**{name: found[0].get(name) for name in _AGREE}, **sums, "longest_document": longest, "input": names}
