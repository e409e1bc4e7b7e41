"""Lines of files, as Python's text mode cuts them: LF, CR LF and a lone CR end a line, and nothing else does (not
U+2028, not U+0085). The last line needs no end. What a line must hold is in ``records.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trimegatron.preprocess.inputs import Source

_BLOCK = 1 << 20  # bytes read at a time: enough for a batch of the engines, little enough to hold many


class Place(NamedTuple):
    """A place between two lines of the input."""

    turn: int = 0  # 0 … partitions - 1: how often all files were read through before
    file: int = 0
    offset: int = 0  # unpacked bytes of the file before it
    line: int = 0  # lines of the file before it
    total: int = 0  # lines of all files before it, in this turn


START = Place()


class Chunk(NamedTuple):
    """Some lines of one file, without their line ends."""

    path: Path
    numbers: range  # of the lines, counted from 1
    lines: list[bytes]
    num_bytes: int  # of them in the file
    end: Place  # where reading goes on
    done: float  # part of the whole input that is read, 0 … 1


def read_chunks(sources: Sequence[Source], start: Place = START, partitions: int = 1) -> Iterator[Chunk]:
    """The lines of files, about 1 MiB at a time (a longer line makes a longer chunk).

    With ``partitions`` P all files are read P times, and time k gives the lines whose number (from 0, over all files)
    is k modulo P: the order in which Megatron-LM's partitions end up when merged.
    """
    weights = [source.num_bytes for source in sources]
    for turn in range(start.turn, partitions):
        at = start if turn == start.turn else Place(turn)
        for file in range(at.file, len(sources)):
            at = at if file == at.file else Place(turn, file, total=at.total)
            with sources[file].open() as (unpacked, packed):
                for chunk in _read_file(unpacked, sources[file].path, at, partitions):
                    part = (turn * sum(weights) + sum(weights[:file]) + packed.tell()) / max(1, sum(weights))
                    at = chunk.end
                    yield chunk._replace(done=min(1.0, part / partitions))


def _read_file(file: BinaryIO, path: Path, at: Place, partitions: int) -> Iterator[Chunk]:
    _skip(file, at.offset)
    for block, length in _whole_lines(file):
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()  # what follows the last line end is not a line
        del block  # of one long line it is a second copy
        count, skip = len(lines), (at.turn - at.total) % partitions
        numbers = range(at.line + 1 + skip, at.line + 1 + count, partitions)
        at = at._replace(offset=at.offset + length, line=at.line + count, total=at.total + count)
        if partitions > 1:
            lines = lines[skip::partitions]
            length = sum(map(len, lines)) + len(lines)
        yield Chunk(path, numbers, lines, length, at, 0.0)


def _skip(file: BinaryIO, length: int) -> None:
    if file.seekable():
        file.seek(length)
    while not file.seekable() and length > 0:
        length -= len(file.read(min(length, _BLOCK)))


def _whole_lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Blocks that end where a line ends, every line end as LF, and how many bytes of the file each takes.

    No byte of a multi-byte UTF-8 character is CR or LF.
    """
    begun: list[bytes] = []  # of a line that has not ended yet
    length = 0
    while block := file.read(_BLOCK):
        while block.endswith(b"\r") and (more := file.read(1)):  # CR LF is not cut apart
            block += more
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if end:
            head = block[:end]
            if b"\r" in head:
                head = head.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            begun.append(head)
            yield _take(begun), length + end
            length = 0
        if end < len(block):
            begun.append(block[end:])
            length += len(begun[-1])
    if begun:
        yield _take(begun), length


def _take(parts: list[bytes]) -> bytes:
    """All of them as one, with no second copy left behind."""
    whole = b"".join(parts)
    parts.clear()
    return whole
