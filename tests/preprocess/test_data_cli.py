"""``trimegatron data merge``, ``check`` and ``show``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from trimegatron.cli import main
from trimegatron.data.index_format import best_dtype
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.data.metadata import read_metadata
from trimegatron.preprocess import merge as merging

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
Documents = list[list[list[int]]]


def write(prefix: Path, content: Documents, dtype: str = "uint16", **metadata: object) -> str:
    with IndexedDatasetWriter(prefix, dtype, metadata=metadata or None) as writer:
        for document in content:
            writer.add_document([t for s in document for t in s], [len(s) for s in document])
    return str(prefix)


def read(prefix: Path | str) -> Documents:
    data = IndexedDataset(prefix)
    bounds = data.document_indices.tolist()
    return [[data.get(k).tolist() for k in range(a, b)] for a, b in itertools.pairwise(bounds)]


FIRST: Documents = [[[1, 2], [3]], [], [[4]]]
SECOND: Documents = [[], [[5, 6, 7]]]


@pytest.mark.parametrize("tokens", [1, 4, 1 << 22])
def test_merge_is_the_concatenation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(merging, "_TOKENS", tokens)
    sets = [write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND), write(tmp_path / "c", [])]
    assert main(["data", "merge", *sets, sets[0], "--output-prefix", str(tmp_path / "m")]) == 0
    assert read(tmp_path / "m") == FIRST + SECOND + FIRST
    assert IndexedDataset(tmp_path / "m").dtype == np.uint16
    assert read_metadata(tmp_path / "m") == {}
    golden = str(GOLDEN / "tiny" / "tiny_content_document")
    assert main(["data", "merge", golden, "--output-prefix", str(tmp_path / "t")]) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"t{suffix}").read_bytes() == Path(golden + suffix).read_bytes()


def test_types_are_widened_never_reinterpreted(tmp_path: Path) -> None:
    sets = [write(tmp_path / "a", [[[65535]]]), write(tmp_path / "b", [[[70000]]], "int32")]
    sets.append(write(tmp_path / "c", [[[-1]]], "int8"))
    assert main(["data", "merge", *sets, "--output-prefix", str(tmp_path / "m")]) == 0
    assert IndexedDataset(tmp_path / "m").dtype == np.int32
    assert read(tmp_path / "m") == [[[65535]], [[70000]], [[-1]]]
    big = write(tmp_path / "d", [[[2**40]]], "int64")
    assert main(["data", "merge", *sets, big, "--output-prefix", str(tmp_path / "n")]) == 0
    assert read(tmp_path / "n")[3] == [[2**40]]
    assert main(["data", "merge", big, "--output-prefix", str(tmp_path / "o"), "--dataset-impl", "lazy"]) == 3
    assert not list(tmp_path.glob("o*"))


def test_merged_metadata_and_different_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"megatron_compat": 2026, "tokenizer_sha256": "x", "documents": 3, "tokens": 4, "longest_document": 3}
    a = write(tmp_path / "a", FIRST, **made)
    b = write(tmp_path / "b", SECOND, **(made | {"documents": 2, "longest_document": 9}))
    c = write(tmp_path / "c", SECOND, **(made | {"megatron_compat": 2022}))
    assert main(["data", "merge", a, b, "--output-prefix", str(tmp_path / "m")]) == 0
    merged = read_metadata(tmp_path / "m")
    assert (merged["megatron_compat"], merged["documents"], merged["tokens"]) == (2026, 5, 8)
    assert (merged["longest_document"], merged["dtype"]) == (9, "uint16")
    assert main(["data", "merge", a, c, "--output-prefix", str(tmp_path / "n")]) == 2
    assert "different megatron_compat: 2026 and 2022" in capsys.readouterr().err
    assert main(["data", "merge", a, a, "--output-prefix", a]) == 2


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {"megatron_compat": 2022, "vocab_size": 10, "eod": 9, "append_eod": True}
    good = write(tmp_path / "good", [[[1, 9]], [[2, 3], [9]]], **made)
    assert main(["data", "check", good]) == 0
    assert capsys.readouterr().out == (
        f"{good}: sound\n  2 documents, 3 sequences, 5 tokens of uint16, made by Megatron's rules of 2022\n"
    )
    odd = write(tmp_path / "odd", [[[1, 9]], [], [[1, 8]], [[1, 9]], [[12, 9]]], **made)
    assert main(["data", "check", good, odd]) == 3
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == [
        f"{odd}: unusable",
        "  5 documents, 4 sequences, 8 tokens of uint16, made by Megatron's rules of 2022",
        "  error: ids outside the vocabulary 0..9 in 1 documents (4)",
        "  note: no tokens in 1 documents (1)",
        "  note: no end token 9 at the end of 1 documents (2)",
        "  note: the same as an earlier document: 1 documents (3)",
    ]
    assert main(["data", "check", odd, "--vocab-size", "13", "--eod", "8"]) == 0
    assert "no end token 8 at the end of 3 documents (0, 3, 4)" in capsys.readouterr().out
    (tmp_path / "odd.bin").write_bytes((tmp_path / "odd.bin").read_bytes()[:-1])
    assert main(["data", "check", odd]) == 3
    assert "15 bytes, but" in capsys.readouterr().out


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write(tmp_path / "a", FIRST)
    options = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert main(["data", "show", prefix, *options, "--count", "9"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *("--- document 0: 2 sequences, 3 tokens", "1 2 3", "--- document 1: 0 sequences, 0 tokens", ""),
        *("--- document 2: 1 sequences, 1 tokens", "4"),
    ]
    assert main(["data", "show", prefix, *options, "--document", "3"]) == 3
    assert main(["data", "show", prefix, prefix, *options]) == 2
    assert main(["data", "teach"]) == 2
    assert main(["data"]) == 2
    assert main(["data", "--help"]) == 0


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
@pytest.mark.parametrize("vocab_size", [65498, 65499, 65534, 65535, 65536])
def test_largest_ids_near_the_limits_of_the_types_survive(tmp_path: Path, vocab_size: int, impl: str) -> None:
    """The size of NullTokenizer's vocabulary is one more, and its largest id is the end token."""
    (tmp_path / "in").write_text(json.dumps({"text": f"0 {vocab_size - 1}"}) + "\n")
    line = (
        f"preprocess --input {tmp_path / 'in'} --output-prefix {tmp_path / 'x'} --tokenizer-type NullTokenizer "
        f"--vocab-size {vocab_size} --append-eod --dataset-impl {impl}"
    )
    assert main(line.split()) == 0
    dtype = best_dtype(vocab_size + 1) if impl == "mmap" else np.dtype("<i4")
    assert dtype == (np.int32 if vocab_size >= 65499 or impl != "mmap" else np.uint16)
    ids = np.fromfile(tmp_path / "x_text_document.bin", dtype)
    assert ids.tolist() == [0, vocab_size - 1, vocab_size]


def test_merge_takes_every_format(tmp_path: Path) -> None:
    lazy, mmap = (str(GOLDEN / "edge" / f"old_{kind}_eod_content_document") for kind in ("lazy", "mmap"))
    expected = read(lazy)
    for impl in ("mmap", "lazy"):
        arguments = ["data", "merge", lazy, mmap, "--output-prefix", str(tmp_path / impl), "--dataset-impl", impl]
        assert main(arguments) == 0
        assert IndexedDataset(tmp_path / impl).dtype == np.int32
        assert read(tmp_path / impl) == [*expected, *read(mmap)] == [*expected, *expected]
