"""Lines as Python's text mode reads them, at any block size, from any place, of packed files, folders and globs."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimegatron.errors import ConfigError, DataError
from trimegatron.preprocess.inputs import Source, find_sources
from trimegatron.preprocess.reader import read_chunks


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(st.sampled_from(["a", "é", "\n", "\r", "\r\n", "\u2028", "\u0085", "\x0b", "b"]), max_size=30),
    block=st.integers(1, 9),
    partitions=st.integers(1, 4),
    stop=st.integers(0, 12),
)
def test_lines_equal_universal_newlines(
    tmp_path: Path, text: list[str], block: int, partitions: int, stop: int
) -> None:
    path = tmp_path / "in"
    path.write_bytes("".join(text).encode())
    with path.open(encoding="utf-8") as file:
        expected = [(k, line.removesuffix("\n")) for k, line in enumerate(file, 1)]
    expected *= 2  # the file is given twice
    sources = [Source(path), Source(path)]
    chunks = list(read_chunks(sources, partitions=partitions, block=block))
    lines = [(n, raw.decode()) for c in chunks for n, raw in zip(c.numbers, c.take(), strict=True)]
    assert lines == [line for k in range(partitions) for line in expected[k::partitions]]
    assert [c.done for c in chunks] == sorted(c.done for c in chunks)
    if chunks:
        assert chunks[-1].done == 1
        assert sum(c.num_bytes for c in chunks) >= sum(len(line.encode()) for _, line in expected)
        place = chunks[stop % len(chunks)].end
        rest = [
            (n, raw.decode())
            for c in chunks[stop % len(chunks) + 1 :]
            for n, raw in zip(c.numbers, c.take(), strict=True)
        ]
        again = read_chunks(sources, place, partitions, block)
        assert [(n, raw.decode()) for c in again for n, raw in zip(c.numbers, c.take(), strict=True)] == rest


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\nb\nc\n")
    (chunk,) = read_chunks([Source(path)])
    assert chunk.take() == [b"a", b"b", b"c"]
    path.write_bytes(b"a\nb\n")
    with pytest.raises(DataError, match=r"in\.jsonl: was changed while it was read"):
        chunk.take()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_packed_files(tmp_path: Path, suffix: str) -> None:
    text = b"".join(b"line %d\n" % k for k in range(300_000))
    path = pack(tmp_path / f"in.jsonl{suffix}", text[:1_000_000], text[1_000_000:])
    (source,) = find_sources([str(path)])
    chunks = list(read_chunks([source]))
    assert len(chunks) > 2
    assert [raw for chunk in chunks for raw in chunk.take()] == text.split(b"\n")[:-1]
    rest = list(read_chunks([source], chunks[1].end))
    assert [raw for c in rest for raw in c.take()] == [raw for c in chunks[2:] for raw in c.take()]
    assert rest[0].numbers[0] == chunks[1].end.line + 1
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"in\.jsonl{suffix}: not a whole {suffix} file"):
        list(read_chunks([source]))
    path.write_bytes(b"plain text " * 10)
    with pytest.raises(DataError, match=rf"not a whole {suffix} file"):
        list(read_chunks([source]))


def pack(path: Path, *parts: bytes) -> Path:
    """Each part as a frame of its own, as tools that append leave them."""
    if path.suffix == ".zst":
        compress = pytest.importorskip("zstandard").compress
    else:
        compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[path.suffix]
    path.write_bytes(b"".join(compress(part) for part in parts))
    return path


def test_files_folders_and_globs_have_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.jsonl", "b/1.json.gz", "b/c/0.ndjson", "b/.hidden.jsonl", "b/notes.txt", "a.jsonl", "z.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"")

    def found(*names: str) -> list[str]:
        return [str(source.path) for source in find_sources(names)]

    assert found("z.jsonl", "b", "a*") == ["z.jsonl", "b/1.json.gz", "b/2.jsonl", "b/c/0.ndjson", "a.jsonl"]
    assert found("b/**/*.ndjson", "*.jsonl") == ["b/c/0.ndjson", "a.jsonl", "z.jsonl"]
    for names, message in (
        (("b", "b/2.jsonl"), r"--input \(b/2.jsonl\) must not name a file twice"),
        (("x*",), "none of that name"),
        (("b", "nowhere"), r"--input \(nowhere\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_sources(names)
    Path("b/c/0.ndjson").unlink()
    with pytest.raises(ConfigError, match=r"\(b/c\) must hold .json"):
        find_sources(["b/c"])
