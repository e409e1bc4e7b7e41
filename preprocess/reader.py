"""Lines of loose JSON, read as strictly as Python's own text mode and ``json`` read them, by Megatron's rules.

UTF-8 is strict. LF, CR LF and a lone CR end a line, and nothing else does (not U+2028, not U+0085). One JSON object a
line; of a key that comes twice the last one counts; blanks around the object and a missing last line end are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trimegatron.errors import DataError

_BLOCK = 1 << 20  # bytes read at a time
_BOMS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class Chunk(NamedTuple):
    """Some consecutive lines, without their line ends."""

    first_line: int  # counted from 1
    lines: list[bytes]

    @property
    def last_line(self) -> int:
        return self.first_line + len(self.lines) - 1

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.lines)) + len(self.lines)


def read_chunks(path: Path, max_lines: int) -> Iterator[Chunk]:
    """The lines of a file, at most ``max_lines`` and about 1 MiB at a time (a longer line makes a longer chunk)."""
    number = 1
    with path.open("rb") as file:
        for block in _whole_lines(file):
            lines = block.split(b"\n")
            if not lines[-1]:
                lines.pop()  # what follows the last line end is not a line
            for start in range(0, len(lines), max_lines):
                chunk = Chunk(number + start, lines[start : start + max_lines])
                yield chunk
            number += len(lines)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Blocks that end where a line ends, every line end as LF. No byte of a multi-byte UTF-8 character is CR or LF."""
    begun: list[bytes] = []  # of a line that has not ended yet
    while block := file.read(_BLOCK):
        while block.endswith(b"\r") and (more := file.read(1)):  # CR LF is not cut apart
            block += more
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*begun, block[:end]])
            begun = []
        if end < len(block):
            begun.append(block[end:])
    if begun:
        yield b"".join(begun)


def parse_line(raw: bytes, path: Path, number: int, keys: Sequence[str]) -> list[list[str]]:
    """The sentences of each key: one for a string, several for a list of strings.

    Raises:
        DataError: ``file:line: what is wrong``, the keys that are there, and what to do.
    """

    def refuse(reason: str) -> DataError:
        return DataError(f"{path}:{number}: {reason}")

    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        reason = f"byte 0x{raw[error.start]:02x} at position {error.start} is not UTF-8"
        raise refuse(reason + _hint(raw, number)) from None
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        reason = "blank line" if not raw.strip() else f"not JSON ({what})"
        raise refuse(reason + _hint(raw, number)) from None
    if not isinstance(record, dict):
        raise refuse(f"a JSON object is needed, this is {_kind(record)}" + _hint(raw, number))
    return [_sentences(record, key, refuse) for key in keys]


def _sentences(record: dict[str, Any], key: str, refuse: Any) -> list[str]:
    if key not in record:
        present = ", ".join(list(record)[:12]) or "none"
        raise refuse(f"no key {key!r}; the keys here are: {present}. Choose with --json-keys")
    value = record[key]
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise refuse(f"the value of {key!r} must be a text or a list of texts, this is {_kind(sentence)}")
        try:
            sentence.encode()
        except UnicodeEncodeError as error:
            code = ord(sentence[error.start])
            raise refuse(
                f"the value of {key!r} holds half a character: \\u{code:04x} without its other surrogate, "
                f"at position {error.start}"
            ) from None
    return sentences


def _kind(value: object) -> str:
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _hint(raw: bytes, number: int) -> str:
    """What a line that cannot be read looks like."""
    start = raw.lstrip()
    bom = next((name for mark, name in _BOMS.items() if number == 1 and raw.startswith(mark)), None)
    if bom is not None:
        return f". The file begins with a {bom} byte-order mark; save it as plain UTF-8 without one"
    if not start:
        return ". Take it out; one JSON object a line is needed"
    if start.startswith(b"["):
        return ". This looks like a JSON array; one object a line is needed: jq -c '.[]' FILE"
    if start.rstrip() == b"{":
        return ". This looks like an object over several lines; one object a line is needed: jq -c . FILE"
    return ""
