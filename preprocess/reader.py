"""Lines of files, as Python's text mode cuts them: LF, CR LF and a lone CR end a line, and nothing else does (not
U+2028, not U+0085). The last line needs no end. What a line must hold is in ``records.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from trimegatron.errors import DataError
from trimegatron.preprocess.inputs import Source

BLOCK = 1 << 20
"""Bytes read at a time where nothing else is asked for: enough for a batch, little enough to hold many."""


class Place(NamedTuple):
    """A place between two lines of the input."""

    turn: int = 0  # 0 … partitions - 1: how often all files were read through before
    file: int = 0
    offset: int = 0  # unpacked bytes of the file before it
    line: int = 0  # lines of the file before it
    total: int = 0  # lines of all files before it, in this turn


START = Place()


class Span(NamedTuple):
    """Where whole lines are in a plain file: few bytes on the way to the process that needs them."""

    offset: int
    length: int


class Chunk(NamedTuple):
    """Some lines of one file."""

    path: Path
    numbers: range  # of the lines, counted from 1
    lines: list[bytes] | Span  # without their line ends, or where to read them
    num_bytes: int  # of them in the file
    end: Place  # where reading goes on
    done: float  # part of the whole input that is read, 0 … 1

    def take(self) -> list[bytes]:
        """The lines, without their ends, which are then the caller's alone.

        Raises:
            DataError: the file is not what it was.
        """
        if not isinstance(self.lines, Span):
            return self.lines
        with self.path.open("rb") as file:
            file.seek(self.lines.offset)
            lines = _split(file.read(self.lines.length))
        if len(lines) != len(self.numbers):
            raise DataError(f"{self.path}: was changed while it was read")
        return lines


def read_chunks(
    sources: Sequence[Source], start: Place = START, partitions: int = 1, block: int = BLOCK
) -> Iterator[Chunk]:
    """The lines of files, about ``block`` bytes at a time (a longer line makes a longer chunk).

    With ``partitions`` P all files are read P times, and time k gives the lines whose number (from 0, over all files)
    is k modulo P: the order in which Megatron-LM's partitions end up when merged.
    """
    weights = [source.num_bytes for source in sources]
    for turn in range(start.turn, partitions):
        at = start if turn == start.turn else Place(turn)
        for file in range(at.file, len(sources)):
            at = at if file == at.file else Place(turn, file, total=at.total)
            with sources[file].open() as (unpacked, packed):
                spans = partitions == 1 and not sources[file].packed
                for chunk in _read_file(unpacked, sources[file].path, at, partitions, block, spans):
                    part = (turn * sum(weights) + sum(weights[:file]) + packed.tell()) / max(1, sum(weights))
                    at = chunk.end
                    yield chunk._replace(done=min(1.0, part / partitions))


def _read_file(file: BinaryIO, path: Path, at: Place, partitions: int, block: int, spans: bool) -> Iterator[Chunk]:
    _skip(file, at.offset)
    for parts, count, length in _whole_lines(file, block, keep=not spans):
        lines = Span(at.offset, length) if spans else _split(_join(parts))
        skip = (at.turn - at.total) % partitions
        numbers = range(at.line + 1 + skip, at.line + 1 + count, partitions)
        at = at._replace(offset=at.offset + length, line=at.line + count, total=at.total + count)
        if isinstance(lines, list) and partitions > 1:
            lines = lines[skip::partitions]
            length = sum(map(len, lines)) + len(lines)
        yield Chunk(path, numbers, lines, length, at, 0.0)


def _skip(file: BinaryIO, length: int) -> None:
    if file.seekable():
        file.seek(length)
    while not file.seekable() and length > 0:
        length -= len(file.read(min(length, BLOCK)))


def _whole_lines(file: BinaryIO, size: int, *, keep: bool) -> Iterator[tuple[list[bytes], int, int]]:
    """Stretches that end where a line ends: their bytes in parts if to be kept, how many lines, how many bytes.

    No byte of a multi-byte UTF-8 character is CR or LF.
    """
    parts: list[bytes] = []
    length = 0
    while block := file.read(size):
        while block.endswith(b"\r") and (more := file.read(1)):  # CR LF is not cut apart
            block += more
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if end:
            parts += [block[:end]] * keep
            yield parts, _count_lines(block), length + end
            parts, length = [], 0
        if end < len(block):
            parts += [block[end:]] * keep
            length += len(block) - end
    if length:
        yield parts, 1, length


def _count_lines(block: bytes) -> int:
    """Line ends in it, in a quarter of the time of ``bytes.count``."""
    return int(np.count_nonzero(np.frombuffer(_with_lf(block), np.uint8) == ord("\n")))


def _with_lf(block: bytes) -> bytes:
    """Every line end as LF."""
    return block.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in block else block


def _split(block: bytes) -> list[bytes]:
    """The lines in it, without their ends."""
    lines = _with_lf(block).split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last line end is not a line
    return lines


def _join(parts: list[bytes]) -> bytes:
    """All of them as one, with no second copy left behind."""
    whole = b"".join(parts)
    parts.clear()
    return whole
