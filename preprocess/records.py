"""What a line of loose JSON must hold: one object, UTF-8, whose keys have texts.

The rules are Megatron's, which are Python's own: of a key that comes twice the last one counts, and blanks around the
object are allowed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_BOMS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_NAMES = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


class BadLine(Exception):
    """What is wrong with a line and what to do, for whoever knows its file and number."""


def parse_line(raw: bytes, number: int, keys: Sequence[str]) -> list[list[str]]:
    """The sentences of each key: one for a string, several for a list of strings. Raises BadLine."""
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
    escapes = b"\\u" in raw  # without one no text can hold half a character
    return [_sentences(record, key, escapes) for key in keys]


def _sentences(record: dict[str, Any], key: str, escapes: bool) -> list[str]:
    if key not in record:
        present = ", ".join(list(record)[:12]) or "none"
        raise BadLine(f"no key {key!r}; the keys here are: {present}. Choose with --json-keys")
    value = record[key]
    sentences = value if isinstance(value, list) else [value]
    for sentence in sentences:
        if not isinstance(sentence, str):
            raise BadLine(f"the value of {key!r} must be a text or a list of texts, this is {_kind(sentence)}")
        if escapes:
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
