"""One preprocessing run: read, encode, write, report."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimegatron.data.index_format import best_dtype
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.errors import DataError
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.encode import Encoded, Encoder
from trimegatron.preprocess.pool import encode_in_order
from trimegatron.preprocess.reader import Chunk, read_chunks


@dataclass
class Output:
    """What was written for one key."""

    prefix: Path
    documents: int = 0
    empty_documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, encoded: Encoded) -> None:
        self.documents += len(encoded.sequences)
        self.empty_documents += int((encoded.sequences == 0).sum())
        self.sequences += len(encoded.lengths)
        self.tokens += len(encoded.tokens)
        self.text_bytes += encoded.text_bytes

    def describe(self, dtype: np.dtype) -> str:
        ratio = f"{self.text_bytes / self.tokens:.2f}" if self.tokens else "n/a"
        return (
            f"{self.prefix}.bin, .idx: {self.documents:,} documents ({self.empty_documents:,} empty), "
            f"{self.tokens:,} tokens of {dtype.name}, {ratio} bytes of text per token"
        )


@dataclass(frozen=True)
class Summary:
    """The outcome of a run."""

    outputs: dict[str, Output]  # by JSON key
    dtype: np.dtype
    input_bytes: int
    seconds: float

    def describe(self) -> str:
        """A line per key and one about the time."""
        lines = [output.describe(self.dtype) for output in self.outputs.values()]
        rate = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        return "\n".join([*lines, f"{self.input_bytes / 1e6:,.1f} MB in {self.seconds:,.1f} s, {rate:,.2f} MB/s"])


def run(config: PreprocessConfig) -> Summary:
    """Tokenize ``config.input`` into ``{output_prefix}_{key}_document.bin`` and ``.idx``, all of them or none.

    Raises:
        ConfigError: before anything is written.
        DataError: file and line of the first line that cannot be used, a dead worker, or a disk that refuses; nothing
            stays.
    """
    tokenizer = config.tokenizer()
    dtype = best_dtype(tokenizer.vocab_size)
    encoder = Encoder(config.source, config.json_keys, tokenizer, dtype, config.append_eod)
    outputs = {key: Output(Path(f"{config.output_prefix}_{key}_document")) for key in config.json_keys}
    progress = _Progress(config.log_interval, config.source.stat().st_size)
    try:
        with ExitStack() as stack:
            writers = [stack.enter_context(IndexedDatasetWriter(out.prefix, dtype)) for out in outputs.values()]
            chunks = read_chunks(config.source, config.chunk_size)
            for chunk, encoded in encode_in_order(encoder, chunks, config):
                for writer, output, result in zip(writers, outputs.values(), encoded, strict=True):
                    writer.add_documents(result.tokens, result.lengths, result.sequences)
                    output.add(result)
                progress.count(chunk)
    except OSError as error:
        raise DataError(f"{error.filename or config.output_prefix}: {error.strerror or error}") from error
    return Summary(outputs, dtype, progress.bytes, progress.seconds)


class _Progress:
    """A line on stderr every ``interval`` documents."""

    def __init__(self, interval: int, total_bytes: int) -> None:
        self.interval, self.total_bytes = interval, total_bytes
        self.documents = self.bytes = 0
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def count(self, chunk: Chunk) -> None:
        before = self.documents // self.interval
        self.documents += len(chunk.lines)
        self.bytes += chunk.num_bytes
        if self.documents // self.interval == before:
            return
        seconds = max(self.seconds, 1e-9)
        left = max(0, self.total_bytes - self.bytes) * seconds / self.bytes
        print(
            f"Processed {self.documents:,} documents, {100 * self.bytes / max(self.total_bytes, 1):.0f} % "
            f"({self.documents / seconds:,.1f} documents/s, {self.bytes / 1e6 / seconds:,.2f} MB/s, "
            f"{left:,.0f} s left)",
            file=sys.stderr,
            flush=True,
        )
