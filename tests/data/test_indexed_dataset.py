"""The pair of files: reading what Megatron wrote, writing what it would write, refusing what is broken."""

from __future__ import annotations

import itertools
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimegatron.data.index_format import best_dtype
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "data"


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> None:
    """``documents``: sequences of tokens."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document([t for s in document for t in s], [len(s) for s in document])


def test_reads_megatrons_file_of_multi_sequence_documents() -> None:
    data = IndexedDataset(GOLDEN / "int32" / "new_v70000")
    assert data.dtype == np.int32
    assert data.document_indices.tolist() == [0, 1, 3, 4]
    assert [data.get(i).tolist() for i in range(len(data))] == [[1, 2, 3], [69999, 5], [7], [0]]


def test_writes_megatrons_bytes(tmp_path: Path) -> None:
    write(tmp_path / "x", [[[1, 2, 3]], [[69999, 5], [7]], [[0]]], "int32")
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"x{suffix}").read_bytes() == (GOLDEN / "int32" / f"new_v70000{suffix}").read_bytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 255), max_size=5), max_size=3), max_size=8),
    dtype=st.sampled_from(["uint8", "uint16", "int16", "int32", "int64"]),
)
def test_round_trip(tmp_path: Path, documents: list[list[list[int]]], dtype: str) -> None:
    write(tmp_path / "x", documents, dtype)
    data = IndexedDataset(tmp_path / "x")
    assert data.dtype == dtype
    bounds = data.document_indices.tolist()
    read = [[data.get(i).tolist() for i in range(a, b)] for a, b in itertools.pairwise(bounds)]
    assert read == documents
    assert data.num_tokens == sum(len(s) for d in documents for s in d)


def test_part_of_a_sequence_is_a_view(tmp_path: Path) -> None:
    write(tmp_path / "x", [[[1, 2]], [[3, 4, 5, 6]]])
    data = IndexedDataset(tmp_path / "x")
    assert data.get(1, 1, 2).tolist() == [4, 5]
    assert data.get(1, 1).tolist() == [4, 5, 6]
    assert data.get(1, 4).tolist() == []
    assert np.shares_memory(data.get(1), data.tokens)
    for index, offset, length in ((2, 0, None), (-1, 0, None), (0, 1, 2), (0, 3, None), (0, -1, None)):
        with pytest.raises(IndexError):
            data.get(index, offset, length)


@pytest.mark.parametrize("eod", ["eod", "noeod"])
@pytest.mark.parametrize("impl", ["infer", "mmap", "lazy", "cached"])
@pytest.mark.parametrize("kind", ["mmap", "lazy"])
def test_every_layout_is_read_every_way(kind: str, impl: str, eod: str) -> None:
    """Megatron's lazy file (its cached one has the same bytes) holds what its mmap file holds."""
    data = IndexedDataset(GOLDEN / "edge" / f"old_{kind}_{eod}_content_document", impl)
    expected = IndexedDataset(GOLDEN / "edge" / f"old_mmap_{eod}_content_document")
    assert data.dtype == (np.int32 if kind == "lazy" else np.uint16)
    assert data.sizes.dtype == np.int32
    assert (len(data), data.num_tokens) == (len(expected), expected.num_tokens)
    assert data.document_indices.tolist() == expected.document_indices.tolist()
    for i in range(len(data)):
        assert data.get(i).tolist() == expected.get(i).tolist()
        assert data.get(i, 1, 0).tolist() == []
        assert data.get(i, int(data.sizes[i]) - 1).tolist() == expected.get(i).tolist()[-1:]
    copy = pickle.loads(pickle.dumps(data))
    assert copy.impl == impl
    assert copy.get(3).tolist() == expected.get(3).tolist()


def test_broken_lazy_index(tmp_path: Path) -> None:
    source = GOLDEN / "edge" / "old_lazy_eod_content_document"
    index, tokens = (source.with_suffix(suffix).read_bytes() for suffix in (".idx", ".bin"))
    (tmp_path / "x.bin").write_bytes(tokens)
    for content, message in (
        (index[:-8], "bytes, but .* sequences"),
        (index[:20], "cut short"),
        (index[: 56 + 8 * 86 + 8] + struct.pack("<q", -1) + index[56 + 8 * 86 + 16 :], "preprocess again"),
    ):
        (tmp_path / "x.idx").write_bytes(content)
        with pytest.raises(DataError, match=message):
            IndexedDataset(tmp_path / "x")
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(tokens[:-4])
    with pytest.raises(DataError, match="do not belong together"):
        IndexedDataset(tmp_path / "x")


def test_file_cut_under_a_lazy_reader(tmp_path: Path) -> None:
    write(tmp_path / "x", [[[1, 2, 3, 4]]])
    data = IndexedDataset(tmp_path / "x", "lazy")
    with (tmp_path / "x.bin").open("r+b") as file:
        file.truncate(4)
    assert data.get(0, 0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match="ends at byte 4"):
        data.get(0)


def _growth(prefix: Path, impl: str) -> int:
    """Kilobytes of resident memory that random reads over the whole file cost a process of its own."""
    script = (
        "import re, numpy as np; from trimegatron.data.indexed_dataset import IndexedDataset\n"
        "def rss(): return int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        f"data = IndexedDataset({str(prefix)!r}, {impl!r}); random = np.random.default_rng(0); before = rss()\n"
        "for _ in range(20_000): data.get(0, int(random.integers(data.num_tokens - 1024)), 1024).sum()\n"
        "print(rss() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lazy_memory_stays_flat(tmp_path: Path) -> None:
    """A map's pages count as the process's own while the kernel has room for them; a lazy reader has none."""
    write(tmp_path / "x", [[list(range(256)) * 4096 * 16]])  # 32 MB
    assert _growth(tmp_path / "x", "mmap") > 20_000
    assert _growth(tmp_path / "x", "lazy") < 2_000


def test_token_type_of_a_vocabulary() -> None:
    assert [best_dtype(n).name for n in (50257, 65499, 65500, 65536, 70000)] == ["uint16"] * 2 + ["int32"] * 3


def test_ids_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"65536.*uint16"):
        write(tmp_path / "x", [[[65536]]])
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_before_the_end_and_nothing_stays_after_a_failure(tmp_path: Path) -> None:
    write(tmp_path / "x", [[[1]]])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fail_half_way() -> None:
        with IndexedDatasetWriter(tmp_path / "x", "uint16") as writer:
            writer.add_document(np.arange(60_000), [60_000])
            assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name in before} == before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    write(tmp_path / "x", [[[7, 8]]])  # replaces
    assert IndexedDataset(tmp_path / "x").get(0).tolist() == [7, 8]
    assert len(list(tmp_path.iterdir())) == 2


def edit(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.with_suffix(".bin").unlink(), r"x\.bin: no such file"),
        (lambda p: p.with_suffix(".idx").unlink(), r"x\.idx: no such file.*in that folder: other"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"TNTIDX\0\0" + bytes(80)), "version 0"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"{}"), "begins with"),
        (lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:20]), "cut short at 20"),
        (lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:-1]), "81 bytes.*take 82"),
        (lambda p: edit(p.with_suffix(".idx"), 9, struct.pack("<Q", 2)), "version 2"),
        (lambda p: edit(p.with_suffix(".idx"), 17, b"\x06"), "type code 6"),
        (lambda p: p.with_suffix(".bin").write_bytes(b"\1\0" * 4), "8 bytes.*5 tokens"),
        (lambda p: edit(p.with_suffix(".idx"), 82 - 8, struct.pack("<q", 9)), "document array runs over"),
        (lambda p: edit(p.with_suffix(".idx"), 50, struct.pack("<q", 6)), "lengths and offsets disagree"),
    ],
)
def test_broken_pairs_are_refused_with_the_reason(tmp_path: Path, damage, message: str) -> None:
    write(tmp_path / "other", [[[1]]])
    write(tmp_path / "x", [[[1, 2], [3, 4, 5]], []])
    assert (tmp_path / "x.idx").stat().st_size == 82
    damage(tmp_path / "x")
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "x")


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    write(tmp_path / "x", [[[1, 2], [3]]])
    write(tmp_path / "moved" / "y", [[[1, 2], [3]]])
    write(tmp_path / "tokens", [[[1, 9], [3]]])
    write(tmp_path / "lengths", [[[1], [2, 3]]])
    write(tmp_path / "documents", [[[1, 2]], [[3]]])
    prints = {n: IndexedDataset(tmp_path / n).fingerprint() for n in ("x", "moved/y", "tokens", "lengths", "documents")}
    assert prints["x"] == prints["moved/y"]
    assert len(set(prints.values())) == 4


def test_pickles_as_a_path(tmp_path: Path) -> None:
    write(tmp_path / "x", [[list(range(10_000))]])
    pickled = pickle.dumps(IndexedDataset(tmp_path / "x"))
    assert len(pickled) < 1000
    assert pickle.loads(pickled).get(0, 9_999).tolist() == [9_999]


def test_files_of_two_runs_never_stand_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hold two tokens, so that no size would tell: the old index must be gone before the new tokens come."""
    write(tmp_path / "x", [[[1], [2]]])
    original = Path.replace

    def die_after_the_tokens(self: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise OSError("killed here")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", die_after_the_tokens)
    with pytest.raises(OSError, match="killed here"):
        write(tmp_path / "x", [[[7, 8]]])
    with pytest.raises(DataError, match="no such file"):
        IndexedDataset(tmp_path / "x")
