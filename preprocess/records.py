"""What a line of loose JSON must hold: one object, UTF-8, whose keys have texts.

The rules are Megatron's, which are Python's own: of a key that comes twice the last one counts, and blanks around the
object are allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from trimegatron.long_text import LongText

_BOMS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_NAMES = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


Text = str | LongText


class BadLine(Exception):
    """What is wrong with a line and what to do, for whoever knows its file and number."""


LONG = 1 << 24  # bytes of a line from which on its long texts are not made into strings
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

_scan = json.JSONDecoder().raw_decode


def _decode_with_json(raw: bytes) -> Any:
    text = raw.decode()
    record, end = _scan(text)
    if end != len(text) or b"\\ud" in raw or b"\\uD" in raw:  # perhaps half a character, which orjson refuses
        raise ValueError
    return record


def _decoder() -> Callable[[bytes], Any]:
    try:  # half the time; what it refuses goes the slow way, and what it reads otherwise than Python is no text
        from orjson import loads
    except ImportError:
        return _decode_with_json
    return loads


_decode = _decoder()


def parse_line(raw: bytes, number: int, keys: Sequence[str]) -> list[list[Text]]:
    """The sentences of each key: one for a string, several for a list of strings. Raises BadLine."""
    try:  # what nearly all lines are
        record = _decode(raw)
        values = [record[key] for key in keys]
        if {str}.issuperset(map(type, values)):
            return [[value] for value in values]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return _parse_with_reasons(raw, number, keys)


def parse_long_line(raw: bytes, number: int, keys: Sequence[str]) -> list[list[Text]]:
    """``parse_line`` for a very long line: its long strings come as LongText, which stays in the bytes of the line."""
    long = [found.span() for found in _STRING.finditer(raw) if found.end() - found.start() > LONG // 4]
    ends = [0, *(place for span in long for place in span), len(raw)]
    between = [raw[start:stop] for start, stop in zip(ends[::2], ends[1::2], strict=True)]
    skeleton = b"".join(part + b'"\\udfff%d"' % k for k, part in enumerate(between[:-1])) + between[-1]
    if any(b"\\udfff" in part.lower() for part in between):
        return parse_line(raw, number, keys)
    try:
        texts = {f"\udfff{k}": LongText(raw, start + 1, stop - 1) for k, (start, stop) in enumerate(long)}
        found = _parse_with_reasons(skeleton, number, keys, texts)
        return [[texts.get(sentence, sentence) for sentence in sentences] for sentences in found]  # type: ignore[arg-type]
    except (ValueError, BadLine):
        return parse_line(raw, number, keys)  # names what is wrong


def _parse_with_reasons(raw: bytes, number: int, keys: Sequence[str], known: Container[str] = ()) -> list[list[Text]]:
    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise BadLine(
            f"byte 0x{raw[error.start]:02x} at position {error.start} is not UTF-8{_hint(raw, number)}"
        ) from None
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        reason = "blank line" if not raw.strip() else f"not JSON ({what})"
        raise BadLine(reason + _hint(raw, number)) from None
    if not isinstance(record, dict):
        raise BadLine(f"a JSON object is needed, this is {_kind(record)}{_hint(raw, number)}")
    escapes = b"\\u" in raw
    return [_sentences(record, key, escapes, known) for key in keys]


def _sentences(record: dict[str, Any], key: str, escapes: bool, known: Container[str]) -> list[Text]:
    if key not in record:
        present = ", ".join(list(record)[:12]) or "none"
        raise BadLine(f"no key {key!r}; the keys here are: {present}. Choose with --json-keys")
    value = record[key]
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise BadLine(f"the value of {key!r} must be a text or a list of texts, this is {_kind(sentence)}")
        if escapes and sentence not in known:
            _check_surrogates(sentence, key)
    return sentences


def _check_surrogates(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLine(
            f"the value of {key!r} holds half a character: \\u{ord(text[error.start]):04x} without its other "
            f"surrogate, at position {error.start}"
        ) from None


def _kind(value: object) -> str:
    return _NAMES.get(type(value), "null")


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
