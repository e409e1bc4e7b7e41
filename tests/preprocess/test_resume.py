"""Runs that are stopped, killed, or meet bad lines; what stays, and that going on ends in the same bytes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.batches import small_batches
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.errors import ConfigError, DataError
from trimegatron.preprocess import workspace
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.run import run


def config(folder: Path, **changes: Any) -> PreprocessConfig:
    settings: dict[str, Any] = {
        "input": [str(folder / "in.jsonl")],
        "output_prefix": str(folder / "x"),
        "json_keys": ["a", "b"],
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 9999,
        "append_eod": True,
        "workers": 1,
    }
    return PreprocessConfig(**(settings | changes))


def write(folder: Path, lines: int) -> None:
    pick = random.Random(5)
    with (folder / "in.jsonl").open("w") as file:
        for i in range(lines):
            row = {"a": f"{i % 9999} " * pick.randrange(9), "b": [f"{i % 9999}", f"{pick.randrange(9999)}"]}
            file.write(json.dumps(row) + "\n" if i % 50 else "not json\n")


def output(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name.startswith("x_")}


CASES: list[dict[str, Any]] = [{}, {"shuffle_seed": 4}, {"partitions": 3}, {"dataset_impl": "lazy"}]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_run_that_stops_anywhere_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Stopped without any warning at states drawn at random, until it ends."""
    write(tmp_path, 900)
    small_batches(monkeypatch, 4000)
    changes = {"on_bad_line": "skip", **changes}
    summary = run(config(tmp_path, **changes))
    assert (summary.rejects, summary.outputs["a"].documents) == (18, 882)
    expected = output(tmp_path)
    assert len(expected) == 7  # two pairs with their metadata, and the rejects
    for path in expected:
        (tmp_path / path).unlink()

    class Killed(BaseException):
        pass

    save, pick = workspace.Workspace.save, random.Random(1)

    def save_and_die(self: workspace.Workspace, state: dict[str, Any]) -> None:
        save(self, state)
        if pick.random() < 0.5:
            raise Killed

    monkeypatch.setattr(workspace, "INTERVAL", 0.0)
    monkeypatch.setattr(workspace.Workspace, "save", save_and_die)
    stops, summaries = 0, []
    while not summaries:
        try:
            summaries.append(run(config(tmp_path, resume=True, **changes)))
        except Killed:
            stops += 1
            if "report" not in json.loads((tmp_path / "x.partial" / "state.json").read_text()):
                for path in (tmp_path / "x.partial").glob("x_*.bin"):  # what no state counts on may be anything
                    path.write_bytes(path.read_bytes() + b"torn")
    assert stops > 5
    assert output(tmp_path) == expected
    assert summaries[0].outputs == summary.outputs
    assert summaries[0].lines == summary.lines
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", *sorted(expected)]


def test_killed_while_files_are_put_in_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 100)
    run(config(tmp_path, on_bad_line="skip"))
    expected = output(tmp_path)
    replace, left = Path.replace, [0]

    def replace_or_die(self: Path, target: Path) -> Path:
        if self.parent.name == "x.partial" and target.parent == tmp_path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_or_die)
    for survived in range(7):
        for path in output(tmp_path):
            (tmp_path / path).unlink()
        left[0] = survived
        with pytest.raises(KeyboardInterrupt):
            run(config(tmp_path, on_bad_line="skip"))
        left[0] = 99
        run(config(tmp_path, on_bad_line="skip", resume=True))
        assert output(tmp_path) == expected


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_signals_half_way(tmp_path: Path, stop: signal.Signals) -> None:
    write(tmp_path, 60_000)
    run(config(tmp_path, on_bad_line="skip", workers=2))
    expected = output(tmp_path)
    for path in expected:
        (tmp_path / path).unlink()
    code = (
        "import sys, trimegatron.preprocess.workspace as w; w.INTERVAL = 0.05\n"
        "from trimegatron.cli import main; sys.exit(main(['preprocess', *sys.argv[1:]]))"
    )
    arguments = [
        *("--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "x"), "--json-keys", "a", "b"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "9999", "--append-eod", "--on-bad-line", "skip"),
    ]

    def start(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments, *more]
        return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    process = start()
    end = time.monotonic() + 30
    while not (tmp_path / "x.partial" / "state.json").exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (143 if stop == signal.SIGTERM else -9)
    assert ("--resume continues it" in errors) == (stop == signal.SIGTERM)
    assert output(tmp_path) == {}
    process = start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "holds an unfinished run" in errors
    process = start("--resume", "--workers", "1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Continuing at" in errors
    assert output(tmp_path) == expected
    assert not (tmp_path / "x.partial").exists()


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a state, stopped by a bad line."""
    write(tmp_path, 40)
    lines = ['{"a": "1", "b": "2"}'] * 3000
    lines[2500] = '{"a": 1}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    small_batches(monkeypatch, 4000)
    monkeypatch.setattr(workspace, "INTERVAL", 0.0)
    with pytest.raises(DataError, match=r"in\.jsonl:2501: the value of 'a'"):
        run(config(tmp_path))
    assert output(tmp_path) == {}
    return tmp_path


def test_a_bad_line_late_in_a_run_can_be_skipped_on_resume(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(config(unfinished, resume=True, on_bad_line="skip"))
    assert "Continuing at" in capsys.readouterr().err
    assert (summary.outputs["a"].documents, summary.rejects) == (2999, 1)
    (reject,) = map(json.loads, (unfinished / "x_rejects.jsonl").read_text().splitlines())
    assert reject["line"] == 2501
    assert reject["text"] == '{"a": 1}'
    assert reject["file"].endswith("in.jsonl")
    assert "a text or a list of texts, this is a number" in reject["reason"]
    assert len(IndexedDataset(unfinished / "x_b_document")) == 2999


def test_other_options_or_input_are_not_mixed_into_an_unfinished_run(unfinished: Path) -> None:
    for changes in ({"append_eod": False}, {"shuffle_seed": 1}, {"dataset_impl": "lazy"}, {"vocab_size": 99}):
        name = {"vocab_size": "tokenizer"}.get(next(iter(changes)), next(iter(changes)).replace("_", "-"))
        with pytest.raises(ConfigError, match=f"had other {name}.*--no-resume"):
            run(config(unfinished, resume=True, **changes))
    with (unfinished / "in.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match="had other input"):
        run(config(unfinished, resume=True))
    with pytest.raises(ConfigError, match=r"unfinished run \(\d+ % done\).*--resume"):
        run(config(unfinished))
    with pytest.raises(DataError):
        run(config(unfinished, resume=False, json_keys=["b"], on_bad_line="fail"))


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 10)
    held = workspace.Workspace(str(tmp_path / "x"), {}, None)
    with pytest.raises(ConfigError, match=r"x\.partial: another run is writing"):
        run(config(tmp_path, on_bad_line="skip"))
    held.close(remove=True)
    run(config(tmp_path, on_bad_line="skip"))


def test_resume_without_anything_to_resume_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 10)
    run(config(tmp_path, on_bad_line="skip", resume=True))
    assert "Nothing to continue" in capsys.readouterr().err


def test_rejects_of_an_earlier_run_do_not_stay(tmp_path: Path) -> None:
    write(tmp_path, 10)
    run(config(tmp_path, on_bad_line="skip"))
    assert (tmp_path / "x_rejects.jsonl").exists()
    (tmp_path / "in.jsonl").write_text('{"a": "1", "b": "2"}\n')
    run(config(tmp_path))
    assert not (tmp_path / "x_rejects.jsonl").exists()


def test_what_the_tokenizer_refuses_is_skipped_too(tmp_path: Path) -> None:
    lines = [b'{"a": "1", "b": "2"}', b'{"a": "1", "b": "x"}', b"\xff\xfe", b"", b'{"a": "3", "b": "4"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    summary = run(config(tmp_path, on_bad_line="skip"))
    rejects = [json.loads(line) for line in (tmp_path / "x_rejects.jsonl").read_text().splitlines()]
    assert [reject["line"] for reject in rejects] == [2, 3, 4]
    assert rejects[1]["text"] == "\\xff\\xfe"
    assert summary.outputs["a"].documents == summary.outputs["b"].documents == 2
    assert [IndexedDataset(tmp_path / "x_b_document").get(k).tolist() for k in range(2)] == [[2, 9999], [4, 9999]]
    assert "3 lines could not be used" in summary.describe()
