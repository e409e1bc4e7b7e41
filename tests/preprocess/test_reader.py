"""Lines as Python's text mode reads them, at any block size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimegatron.preprocess import reader
from trimegatron.preprocess.reader import read_chunks


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(["a", "é", "\n", "\r", "\r\n", "\u2028", "\u0085", "\x0b", "b"]), max_size=30),
    block=st.integers(1, 9),
    max_lines=st.integers(1, 4),
)
def test_lines_equal_universal_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: list[str], block: int, max_lines: int
) -> None:
    path = tmp_path / "in"
    path.write_bytes("".join(text).encode())
    monkeypatch.setattr(reader, "_BLOCK", block)
    chunks = list(read_chunks(path, max_lines))
    with path.open(encoding="utf-8") as file:
        expected = [line.removesuffix("\n") for line in file]
    assert [line.decode() for chunk in chunks for line in chunk.lines] == expected
    assert all(1 <= len(chunk.lines) <= max_lines for chunk in chunks)
    numbers = [n for chunk in chunks for n in range(chunk.first_line, chunk.last_line + 1)]
    assert numbers == list(range(1, len(expected) + 1))
