"""Preprocessing against Megatron-LM's own files, byte for byte, and everything it must refuse."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batches import small_batches
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.errors import ConfigError, DataError
from trimegatron.preprocess import config as config_module
from trimegatron.preprocess.cli import main
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.run import run
from trimegatron.tokenizer import build_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
INPUTS = GOLDEN / "data" / "inputs"

needs_gigatoken = pytest.mark.skipif(find_spec("gigatoken") is None, reason="gigatoken is not installed")


def config(source: Path, prefix: Path, **changes: Any) -> PreprocessConfig:
    settings: dict[str, Any] = {
        "input": [str(source)],
        "json_keys": ["content"],
        "output_prefix": str(prefix),
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(GOLDEN / "gpt2" / "vocab.json"),
        "merge_file": str(GOLDEN / "gpt2" / "merges.txt"),
        "append_eod": True,
        "tokenizer_engine": "tokenizers",
    }
    return PreprocessConfig(**(settings | changes))


def assert_same(prefix: Path, golden: Path, golden_index: Path | None = None) -> None:
    assert Path(f"{prefix}.bin").read_bytes() == Path(f"{golden}.bin").read_bytes()
    assert Path(f"{prefix}.idx").read_bytes() == Path(f"{golden_index or golden}.idx").read_bytes()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes are several chunks; GPT-2's vocabulary is read once."""
    small_batches(monkeypatch, 1000)
    monkeypatch.setattr(config_module, "build_tokenizer", _build)


_build = functools.cache(build_tokenizer)


ENGINES = ["tokenizers", pytest.param("gigatoken", marks=needs_gigatoken)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("block", [7, 1000, 1 << 20])
def test_edge_cases(tmp_path: Path, append_eod: bool, block: int, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch, block)
    source = GOLDEN / "data" / "edge" / "edge.jsonl"
    summary = run(config(source, tmp_path / "x", append_eod=append_eod, tokenizer_engine=engine))
    name = f"new_{'eod' if append_eod else 'noeod'}_content_document"
    assert_same(tmp_path / "x_content_document", GOLDEN / "data" / "edge" / name)
    output = summary.outputs["content"]
    assert (output.documents, output.empty_documents, output.sequences) == (45, 3, 42)
    assert output.tokens == 5832 + 42 * append_eod
    assert summary.input_bytes == source.stat().st_size


@pytest.mark.parametrize("source", sorted(INPUTS.glob("ok_*.jsonl")), ids=lambda p: p.stem)
def test_legal_oddities(tmp_path: Path, source: Path) -> None:
    run(config(source, tmp_path / "x"))
    assert_same(tmp_path / "x_content_document", INPUTS / f"new_{source.stem}_content_document")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
def test_rules_and_formats_of_2022(tmp_path: Path, append_eod: bool, impl: str, engine: str) -> None:
    changes = {"dataset_impl": impl, "megatron_compat": 2022, "append_eod": append_eod, "tokenizer_engine": engine}
    summary = run(config(GOLDEN / "data" / "edge" / "edge.jsonl", tmp_path / "x", **changes))
    name = f"old_{'mmap' if impl == 'mmap' else 'lazy'}_{'eod' if append_eod else 'noeod'}_content_document"
    assert_same(tmp_path / "x_content_document", GOLDEN / "data" / "edge" / name)
    assert (summary.outputs["content"].documents, summary.outputs["content"].empty_documents) == (45, 3)
    assert "left out as in 2022" in summary.describe()


@pytest.mark.parametrize("source", sorted(INPUTS.glob("ok_*.jsonl")), ids=lambda p: p.stem)
def test_legal_oddities_of_2022(tmp_path: Path, source: Path) -> None:
    golden = INPUTS / f"old_{source.stem}_content_document"
    if golden.with_suffix(".idx").exists():  # a list of sentences was an error then
        run(config(source, tmp_path / "x", megatron_compat=2022))
        assert_same(tmp_path / "x_content_document", golden)


@pytest.mark.parametrize("compat", [2022, 2026])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_writes_the_same(tmp_path: Path, workers: int, engine: str, compat: int) -> None:
    source = tmp_path / "in"
    literal = b'{"content": "a<|endoftext|> b"}\n'
    source.write_bytes((GOLDEN / "data" / "tiny" / "tiny.jsonl").read_bytes() + literal)
    changes = {"workers": workers, "tokenizer_engine": engine, "megatron_compat": compat}
    run(config(source, tmp_path / "x", **changes))
    tiny = GOLDEN / "data" / "tiny"
    tokens = [64, 27, 91, 437, 1659, 5239, 91, 29, 275, 50256] if compat == 2022 else [64, 50256, 275, 50256]
    expected = (tiny / "tiny_content_document.bin").read_bytes() + np.array(tokens, "<u2").tobytes()
    assert (tmp_path / "x_content_document.bin").read_bytes() == expected
    data = IndexedDataset(tmp_path / "x_content_document")
    golden = IndexedDataset(tiny / "tiny_content_document")
    assert data.sizes.tolist() == [*golden.sizes.tolist(), len(tokens)]
    assert len(data.document_indices) == (149 if compat == 2022 else 152)  # three documents are empty


@pytest.mark.parametrize("workers", [1, 2])
def test_megatrons_index_of_today(tmp_path: Path, workers: int) -> None:
    run(config(GOLDEN / "data" / "tiny" / "tiny.jsonl", tmp_path / "x", workers=workers))
    tiny = GOLDEN / "data" / "tiny"
    assert_same(tmp_path / "x_content_document", tiny / "tiny_content_document", tiny / "tiny_new_content_document")


def test_large_vocabulary_and_two_sequences(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"text": "1 2 3"}\n{"text": ["69999 5", "7"]}\n{"text": "0"}\n')
    run(
        PreprocessConfig(
            input=[str(tmp_path / "in")],
            output_prefix=str(tmp_path / "x"),
            tokenizer_type="NullTokenizer",
            vocab_size=70000,
        )
    )
    assert_same(tmp_path / "x_text_document", GOLDEN / "data" / "int32" / "new_v70000")


def test_several_keys(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"a": "x y", "b": ""}\n{"a": "z", "b": "w"}\n')
    summary = run(config(tmp_path / "in", tmp_path / "x", json_keys=["b", "a"]))
    first, second = IndexedDataset(tmp_path / "x_a_document"), IndexedDataset(tmp_path / "x_b_document")
    assert [first.get(i).tolist() for i in range(2)] == [[87, 331, 50256], [89, 50256]]
    assert second.document_indices.tolist() == [0, 0, 1]
    assert summary.outputs["b"].empty_documents == 1


EXPECTED = {
    "bad_blank": "blank line",
    "bad_bom": "UTF-8 byte-order mark",
    "bad_int": "'content' must be a text or a list of texts, this is a number",
    "bad_json": "not JSON.*Unterminated string.*column 13",
    "bad_nokey": "no key 'content'; the keys here are: text.*--json-keys",
    "bad_notdict": "this is a list.*one object a line",
    "bad_null": "this is null",
    "bad_surrogate": r"\\ud800",
    "bad_utf8": "byte 0xe9 at position 16 is not UTF-8",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_bad_lines_name_file_and_line_and_leave_nothing(tmp_path: Path, name: str) -> None:
    assert {p.stem for p in INPUTS.glob("bad_*.jsonl")} == set(EXPECTED)
    line = 1 if name == "bad_bom" else 4
    with pytest.raises(DataError, match=rf"{name}\.jsonl:{line}: .*{EXPECTED[name]}") as error:
        run(config(INPUTS / f"{name}.jsonl", tmp_path / "x"))
    assert error.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"content": "a"},\n{"content": "b"}]\n', ":1: .*looks like a JSON array"),
        ("[\n", ":1: .*looks like a JSON array"),
        ('{\n"content": "a"\n}\n', ":1: .*over several lines"),
        ('{"content": "a"}\n\n', ":2: blank line"),
        ('{"content": "a"}\r\n{"content": ["b", 1]}\r\n', ":2: .*list of texts, this is a number"),
        ('{"content": "a"}\n' + "[" * 100_000, ":2: "),
        ("17\n", ":1: .*this is a number"),
    ],
)
def test_other_bad_lines(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "in").write_text(text, newline="")
    with pytest.raises(DataError, match="(?s)in" + message):
        run(config(tmp_path / "in", tmp_path / "x"))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_the_tokenizers_own_complaint_gets_the_line(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"text": "1"}\n{"text": "one"}\n')
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "json_keys": ["text"]}
    with pytest.raises(DataError, match=r":2: NullTokenizer.*'one'"):
        run(config(tmp_path / "in", tmp_path / "x", **null))


def test_failure_keeps_the_earlier_output_and_success_replaces_it(tmp_path: Path) -> None:
    run(config(INPUTS / "ok_list.jsonl", tmp_path / "x"))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(DataError):
        run(config(INPUTS / "bad_null.jsonl", tmp_path / "x"))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    run(config(INPUTS / "ok_cr_lines.jsonl", tmp_path / "x"))
    assert_same(tmp_path / "x_content_document", INPUTS / "new_ok_cr_lines_content_document")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": ["nowhere"]}, r"--input \(nowhere\) must be a file"),
        ({"input": [str(GOLDEN / "gpt2")] * 2}, "must not name a file twice"),
        ({"output_prefix": "no/where/x"}, r"--output-prefix \(no/where/x\).*existing folder"),
        ({"dataset_impl": "infer"}, "--dataset-impl.*must be one of mmap, lazy, cached"),
        ({"megatron_compat": 2024}, "--megatron-compat.*must be one of 2022, 2026"),
        ({"keep_newlines": True}, "--keep-newlines.*about --split-sentences"),
        ({"partitions": 2, "shuffle_seed": 1}, "--partitions.*Choose one"),
        ({"max_documents": 2}, "head -n"),
        ({"workers": 0}, "--workers"),
        ({"json_keys": ["a", "a"]}, "--json-keys"),
        ({"vocab_file": "nowhere"}, r"--vocab-file \(nowhere\)"),
        ({"vocab_file": None}, "needs --vocab-file"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(config(INPUTS / "ok_list.jsonl", tmp_path / "x", **changes))
    assert list(tmp_path.iterdir()) == []


def test_eod_without_an_end_token_is_refused_before_any_output(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    words = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"--append-eod.*has none.*eos_token"):
        run(config(INPUTS / "ok_list.jsonl", tmp_path / "x", **words))
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    run(config(INPUTS / "ok_list.jsonl", tmp_path / "x", append_eod=False, **words))


def test_command_of_the_blog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Literal, except for the number of workers, which are processes."""
    monkeypatch.chdir(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(GOLDEN / "gpt2" / name)
    documents = [{"content": "import os\n"}, {"content": ""}] * 60
    (tmp_path / "codeparrot_data.json").write_text("".join(json.dumps(d) + "\n" for d in documents))
    line = (
        "--input codeparrot_data.json --output-prefix codeparrot --vocab vocab.json --dataset-impl mmap "
        "--tokenizer-type GPT2BPETokenizer --merge-file merges.txt --json-keys content --workers 1 --chunk-size 25 "
        "--append-eod"
    )
    assert main(line.split()) == 0
    data = IndexedDataset("codeparrot_content_document")
    assert (len(data), len(data.document_indices)) == (60, 121)
    assert data.get(0).tolist() == [11748, 28686, 198, 50256]
    written = capsys.readouterr()
    assert "120 documents (60 empty), 240 tokens of uint16, 2.50 bytes of text per token" in written.out
    assert "longest document 4 tokens, 4 of 50,257 ids used" in written.out
    assert "Processed 120 documents, 100 %" in written.err
    assert "--chunk-size (25) has no effect" in written.err
    snake = line.replace("--output-prefix codeparrot", "--output_prefix other").replace("--chunk-size", "--chunk_size")
    assert main([*snake.split(), "--log_interval", "1000"]) == 0
    assert Path("other_content_document.bin").read_bytes() == Path("codeparrot_content_document.bin").read_bytes()
    with pytest.raises(ConfigError, match="--output-prefx"):
        main(["--output-prefx", "x"])


@pytest.mark.parametrize("workers", [1, 2])
def test_packed_files_by_glob_or_folder_give_the_bytes_of_the_whole(tmp_path: Path, workers: int) -> None:
    lines = (GOLDEN / "data" / "tiny" / "tiny.jsonl").read_bytes().splitlines(keepends=True)
    folder = tmp_path / "parts"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k}.json.gz").write_bytes(gzip.compress(b"".join(lines[50 * k : 50 * k + 50])))
    tiny = GOLDEN / "data" / "tiny"
    for name in (folder, folder / "*.gz"):
        run(config(name, tmp_path / "x", workers=workers))
        assert_same(tmp_path / "x_content_document", tiny / "tiny_content_document", tiny / "tiny_new_content_document")


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from trimegatron.cli import main; assert main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for documents in (100_000, 400_000):
        (tmp_path / "in").write_text('{"text": "1 2 3"}\n' * documents)
        line = f"preprocess --input {tmp_path / 'in'} --output-prefix {tmp_path / 'x'} --append-eod --workers 1"
        command = [sys.executable, "-c", code, *line.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 8  # MiB; twelve bytes a document alone would be 3.4, Python objects fifty
    assert IndexedDataset(tmp_path / "x_text_document").document_indices[-1] == 400_000
