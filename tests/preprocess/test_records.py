"""A line means the same whichever library reads it: what Python's own json makes of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimegatron.preprocess import records
from trimegatron.preprocess.records import BadLine, parse_line

LINES = [
    b'{"text": "plain"}',
    b' {"text": "blanks around"} \r',
    b'{"text": "a", "text": "the last one counts"}',
    b'{"text": "\\ud83d\\ude00 a pair"}',
    b'{"text": "\\uD83D half"}',
    b'{"text": "\\ude00\\ud83d turned round"}',
    b'{"other": "\\ud83d", "text": "half a character elsewhere"}',
    b'{"text": "nan beside", "x": NaN, "y": -Infinity, "z": 1e999, "n": 123456789012345678901234567890}',
    b'{"text": ["several", "sentences"]}',
    b'{"text": null}',
    b'{"text": "\\u0000 zero"}',
    b'{"text": "raw \x01 control"}',
    b'{"text": "\xff\xfe"}',
    b'{"text": "\xed\xa0\x80"}',  # half a character as three bytes
    b'\xef\xbb\xbf{"text": "a mark"}',
    b'{"text": "two"} {"text": "objects"}',
    b'{"text": "comma",}',
    b'["text"]',
    b'"text"',
    b"7",
    b"",
    b"[" * 2000,
    b'{"text": "deep", "x": ' + b"[" * 1200 + b"]" * 1200 + b"}",
    "{'text': 'é'}".encode(),
    b'{"text": "\\x41"}',
    b'{"te\\u0078t": "an escaped key"}',
]


def outcome(raw: bytes) -> object:
    try:
        return parse_line(raw, 1, ["text"])
    except BadLine as error:
        return str(error)


def check(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(records, "_decode", records._decode_with_json)
        expected = outcome(raw)
    assert outcome(raw) == expected
    try:
        value = json.loads(raw.decode())["text"]
        "".join(value).encode()
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    sentences = value if isinstance(value, list) else [value]
    assert expected == [sentences] or not all(isinstance(sentence, str) for sentence in sentences)


def test_orjson_is_what_is_tested():
    assert records._decode.__module__ == "orjson"


@pytest.mark.parametrize("raw", LINES, ids=range(len(LINES)))
def test_same_outcome(raw: bytes, monkeypatch: pytest.MonkeyPatch):
    check(raw, monkeypatch)


texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(texts | st.none() | st.integers() | st.floats(), lambda inner: st.lists(inner, max_size=3))


@settings(max_examples=400, deadline=None)
@given(
    record=st.dictionaries(st.sampled_from(["text", "a", "té"]), texts | values, max_size=3),
    ascii_only=st.booleans(),
    place=st.integers(0, 200),
    byte=st.none() | st.integers(0, 255),
)
def test_same_outcome_of_any_line(record: dict, ascii_only: bool, place: int, byte: int | None):
    raw = bytearray(json.dumps(record, ensure_ascii=ascii_only).encode())
    if byte is not None:
        raw[place % len(raw)] = byte
    with pytest.MonkeyPatch.context() as monkeypatch:
        check(bytes(raw), monkeypatch)
