"""What decides the order and the cut of documents: seeds, partitions, sentences."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.batches import small_batches
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.errors import ConfigError
from trimegatron.preprocess import sentences, shuffle
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.run import run

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch, 300)


def numbers(folder: Path, rows: list[Any], **changes: Any) -> PreprocessConfig:
    (folder / "in").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "input": [str(folder / "in")],
        "output_prefix": str(folder / "x"),
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 9999,
        "workers": 1,
    }
    return PreprocessConfig(**(settings | changes))


def documents(prefix: Path) -> list[list[list[int]]]:
    data = IndexedDataset(prefix)
    bounds = data.document_indices.tolist()
    return [[data.get(k).tolist() for k in range(a, b)] for a, b in itertools.pairwise(bounds)]


ROWS: list[Any] = [f"{i} " * (i % 7) if i % 5 else [f"{i}", f"{i} {i}"] for i in range(500)]
"""Empty ones, short ones, some of two sequences."""


def test_shuffled_documents_are_a_permutation_that_only_the_seed_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(numbers(tmp_path, ROWS))
    plain = documents(tmp_path / "x_text_document")
    orders = {}
    for seed in (0, 1):
        run(numbers(tmp_path, ROWS, shuffle_seed=seed))
        keys = shuffle.document_keys(seed, 0, len(ROWS))
        orders[seed] = documents(tmp_path / "x_text_document")
        assert orders[seed] == [plain[k] for k in np.argsort(keys, kind="stable")]
    assert orders[0] != orders[1] != plain
    monkeypatch.setattr(shuffle, "_BUCKET_BYTES", 500)
    monkeypatch.setattr(shuffle, "_BUFFER_BYTES", 1000)
    run(numbers(tmp_path, ROWS, shuffle_seed=1, megatron_compat=2022))
    assert documents(tmp_path / "x_text_document") == [d for d in orders[1] if d]
    run(numbers(tmp_path, ROWS, shuffle_seed=1, workers=2))
    assert documents(tmp_path / "x_text_document") == orders[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "in",
        *(f"x_text_document.{s}" for s in ("bin", "idx", "meta.json")),
    ]


def test_keys_are_spread_evenly() -> None:
    keys = shuffle.document_keys(1234, 0, 1 << 16)
    assert len(np.unique(keys)) == 1 << 16
    counts = np.bincount((keys >> np.uint64(58)).astype(int), minlength=64)
    assert abs(counts - 1024).max() < 6 * 32  # six standard deviations
    assert np.array_equal(shuffle.document_keys(1234, 100, 5), keys[100:105])
    places = keys.argsort().argsort()
    assert abs(np.corrcoef(places, np.arange(1 << 16))[0, 1]) < 0.02


def test_keys_of_all_pairs_move_together(tmp_path: Path) -> None:
    config = numbers(tmp_path, ["1"], json_keys=["a", "b"], shuffle_seed=3)
    (tmp_path / "in").write_text("".join(json.dumps({"a": str(i), "b": str(i + 1)}) + "\n" for i in range(100)))
    run(config)
    a, b = (documents(tmp_path / f"x_{key}_document") for key in "ab")
    assert [[[t + 1 for t in s] for s in d] for d in a] == b
    assert a != sorted(a)


@pytest.mark.parametrize("partitions", [2, 3, 7])
def test_partitions_take_every_nth_line_over_all_files(tmp_path: Path, partitions: int) -> None:
    numbers(tmp_path, [str(i) for i in range(50, 101)])
    (tmp_path / "in").rename(tmp_path / "second")
    config = numbers(tmp_path, [str(i) for i in range(50)], input=[str(tmp_path / "in"), str(tmp_path / "second")])
    run(PreprocessConfig(**(vars(config) | {"partitions": partitions})))
    order = [i for k in range(partitions) for i in range(k, 101, partitions)]
    assert documents(tmp_path / "x_text_document") == [[[i]] for i in order]
    run(PreprocessConfig(**(vars(config) | {"partitions": partitions, "keep_sequential_samples": True})))
    assert documents(tmp_path / "x_text_document") == [[[i]] for i in range(101)]


def gpt2(folder: Path, source: Path, **changes: Any) -> PreprocessConfig:
    settings: dict[str, Any] = {
        "input": [str(source)],
        "json_keys": ["content"],
        "output_prefix": str(folder / "x"),
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(GOLDEN / "gpt2" / "vocab.json"),
        "merge_file": str(GOLDEN / "gpt2" / "merges.txt"),
        "tokenizer_engine": "tokenizers",
    }
    return PreprocessConfig(**(settings | changes))


@pytest.mark.parametrize("compat", [2022, 2026])
def test_sentences_equal_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compat: int) -> None:
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    # Megatron's files were made with an untrained splitter, which needs no data.
    monkeypatch.setattr(sentences, "load_punkt", lambda lang: punkt.PunktSentenceTokenizer())
    folder = GOLDEN / "data" / "sentence"
    run(gpt2(tmp_path, folder / "in.jsonl", split_sentences=True, append_eod=True, megatron_compat=compat))
    golden = folder / f"{'old' if compat == 2022 else 'new'}_content_sentence"
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"x_content_sentence{suffix}").read_bytes() == Path(f"{golden}{suffix}").read_bytes()


def test_newlines_between_sentences_are_kept_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    monkeypatch.setattr(sentences, "load_punkt", lambda lang: punkt.PunktSentenceTokenizer())
    text = "  One here.\n\nTwo there!  Three\nis long.\n"
    cut = sentences.SentenceSplitter("english", keep_newlines=False, megatron_compat=2026)
    keep = sentences.SentenceSplitter("english", keep_newlines=True, megatron_compat=2026)
    assert cut(text) == ["  One here.", "Two there!", "Three\nis long."]
    assert keep(text) == ["  One here.\n\n", "Two there!  ", "Three\nis long."]
    assert [keep(blank) for blank in ("", " \n")] == [[], []]
    monkeypatch.setattr(sentences, "_MOST", 4)
    assert cut("abc. Def.") == ["abc.", " Def", "."]
    old = sentences.SentenceSplitter("english", keep_newlines=False, megatron_compat=2022)
    assert old("abc. Def.") == ["abc.", "Def."]


def test_missing_sentence_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nltk")
    monkeypatch.setattr("nltk.data.path", [])
    with pytest.raises(ConfigError, match=r"--lang \(klingon\) is not on this machine.*nltk.downloader punkt_tab"):
        run(gpt2(tmp_path, GOLDEN / "data" / "sentence" / "in.jsonl", split_sentences=True, lang="klingon"))
    assert list(tmp_path.iterdir()) == []


def test_missing_nltk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nltk.tokenize.punkt", None)
    with pytest.raises(ConfigError, match=r"needs the nltk package.*trimegatron\[nltk\]"):
        run(gpt2(tmp_path, GOLDEN / "data" / "sentence" / "in.jsonl", split_sentences=True))
