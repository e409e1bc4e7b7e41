"""The data benchmark, in small: what it refuses, what it measures with, and one whole run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trimegatron.bench import data
from trimegatron.bench.corpora import head, repeated, write_sparse
from trimegatron.bench.measure import Contender, Figures, check_equal, in_turns, median, peak_memory, versions
from trimegatron.bench.results import read_run
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.errors import ConfigError, UserError


def hold(megabytes: int) -> dict[str, float]:
    """For a process of its own: peak memory before and after holding this much."""
    before = peak_memory()["peak_mb"]
    held = np.ones(megabytes * 10**6, np.uint8)
    return {"before": before, "after": peak_memory()["peak_mb"], "held": len(held)}


def test_peak_memory_is_the_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process holds does not count for a process it starts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    mine = np.ones(200 * 10**6, np.uint8)
    (figures,) = in_turns({"x": Contender(f"{__name__}:hold", {"megabytes": 100})}, 1)["x"]
    assert figures["before"] < 150
    assert 95 < figures["after"] - figures["before"] < 130
    assert peak_memory()["peak_mb"] > len(mine) / 1e6


def test_a_run_that_fails_ends_the_benchmark_with_its_words() -> None:
    with pytest.raises(UserError, match=r"(?s)nothing_there ended with exit code 1.*no attribute 'nothing_there'"):
        Contender("trimegatron.bench.measure:nothing_there", {}).run()


def test_different_results_are_refused() -> None:
    figures = {"a": [{"ids": "1", "seconds": 1}, {"ids": "1", "seconds": 2}], "b": [{"ids": "1"}], "c": [{"other": 5}]}
    check_equal(figures, "ids")
    with pytest.raises(UserError, match="differ in ids"):
        check_equal(figures | {"d": [{"ids": "2"}]}, "ids")
    with pytest.raises(UserError, match="differ in seconds"):
        check_equal(figures, "seconds")
    assert median([{"s": 3}, {"s": 1}, {"s": 2}], "s") == 2


def test_wrong_ids_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender runs once, on little, and no more."""
    calls = []

    def wrong(self: Contender) -> Figures:
        calls.append(self.function)
        return {"ids": str(len(calls)), "seconds": 1.0, "tokens": 1, "peak_mb": 1.0}

    monkeypatch.setattr(Contender, "run", wrong)
    corpus, other = tmp_path / "corpus.jsonl", str(tmp_path / "corpus.jsonl")
    corpus.write_text('{"content": "x"}\n')
    config = data.DataBenchConfig(input=other, vocab_file=other, merge_file=other, rounds=5)
    contenders = data.preprocess_contenders(config, corpus, corpus, "content", (other, other), tmp_path)
    with pytest.raises(UserError, match="the results differ in ids, so their times mean nothing"):
        list(data.preprocess(config, tmp_path))
    assert calls == [contender.function for contender in contenders.values()]


def test_corpora(tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(b'{"text": "x"}\n' * 1000 + b'{"text": "y"}')
    assert repeated(corpus, 2, tmp_path).read_bytes() == (corpus.read_bytes() + b"\n") * 2
    assert head(corpus, 1.0, tmp_path / "h") == corpus
    cut = head(corpus, 0.001, tmp_path / "h").read_bytes()
    assert 1000 <= len(cut) < 1100 and cut == b'{"text": "x"}\n' * (len(cut) // 14)
    write_sparse(tmp_path / "s", np.array([3, 0, 5], np.int32))
    assert [IndexedDataset(tmp_path / "s").get(i).tolist() for i in range(3)] == [[0] * 3, [], [0] * 5]


def test_versions_say_what_is_missing() -> None:
    assert versions("numpy", "no-such-package") == versions() | {"numpy": np.__version__, "no-such-package": None}


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--cases"):
        data.main(["--cases", "nothing"])
    with pytest.raises(ConfigError, match="--input"):
        data.main(["--input", "/nowhere"])
    with pytest.raises(ConfigError, match="--merge-file"):
        data.main(["--vocab-file", __file__])


def test_the_whole_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every case on next to nothing; the checks inside it compare ours with the libraries alone."""
    text = Path(data.__file__).read_text()
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"code": text[start:]}) + "\n" for start in range(0, 4000, 100)))
    flags = f"--input {corpus} --json-key code --workers 1 --documents 30 300 --samples 100 --seq-length 64 --rounds 1"
    assert data.main([*flags.split(), "--out", str(tmp_path / "out.json"), "--work-dir", str(tmp_path / "work")]) == 0
    found = read_run(tmp_path / "out.json")
    assert found.versions["numpy"] == np.__version__ and found.machine["cores"] >= 1
    rates = {case.variant: case for case in found.cases if (case.case, case.figure) == ("preprocess", "rate")}
    assert {"trimegatron, tokenizers", "tokenizers alone"} <= set(rates) and rates["tokenizers alone"].median > 0
    times = {
        (case.case, case.variant, case.parameters["documents"]): case.median
        for case in found.cases
        if case.figure == "time"
    }
    for documents in (30, 300):
        assert (
            times["index maps", "trimegatron", documents] > 0 and times["open from files", "trimegatron", documents] > 0
        )
    read = [case for case in found.cases if case.unit == "samples/s" and case.variant == "trimegatron"]
    assert len(read) == 2 * 4 and all(case.median > 0 for case in read)
    printed = capsys.readouterr().out
    assert "times the speed of tokenizers alone" in printed
