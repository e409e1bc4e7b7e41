"""Worker processes: deaths are noticed, nobody is left behind, memory is bounded."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from trimegatron.errors import DataError
from trimegatron.preprocess import pool
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.encode import Encoder
from trimegatron.preprocess.engine import TokenizersEngine
from trimegatron.preprocess.pool import encode_in_order
from trimegatron.preprocess.reader import Chunk, Place
from trimegatron.preprocess.run import run
from trimegatron.tokenizer import NullTokenizer

encode = Encoder.__call__


def numbers(folder: Path, lines: int) -> PreprocessConfig:
    with (folder / "in").open("w") as file:
        for i in range(lines):
            file.write(json.dumps({"text": "7 " * 2000 + str(i % 9)}) + "\n")
    return PreprocessConfig(
        input=[str(folder / "in")],
        output_prefix=str(folder / "x"),
        tokenizer_type="NullTokenizer",
        vocab_size=9,
        workers=2,
    )


def until(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_worker_ends_the_run_with_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(pool, "_start_method", lambda: method)
    config = numbers(tmp_path, 20_000)
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            run(config)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(lambda: any(p.stat().st_size for p in tmp_path.glob("x.partial/*.bin")) or errors)
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    killed = time.monotonic()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - killed < 10
    assert isinstance(errors[0], DataError)
    assert "worker process died" in str(errors[0])
    first, last = re.findall(r"in:(\d+)", str(errors[0]))
    assert 1 < int(first) < int(last) <= 20_000
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    config = numbers(tmp_path, 20_000)
    code = "import sys; from trimegatron.preprocess.cli import main; main(sys.argv[1:])"
    arguments = ["--input", *config.input, "--output-prefix", config.output_prefix, "--workers", "2"]
    arguments += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    parent = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)
    until(lambda: any(p.stat().st_size for p in tmp_path.glob("x.partial/*.bin")))
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) >= 2
    parent.kill()
    parent.wait()
    until(lambda: not any(_runs(child) for child in children), seconds=10)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_sigterm_removes_what_was_begun(tmp_path: Path) -> None:
    config = numbers(tmp_path, 20_000)
    code = "import sys; from trimegatron.preprocess.cli import main; main(sys.argv[1:])"
    arguments = ["--input", *config.input, "--output-prefix", config.output_prefix]
    arguments += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)
    until(lambda: any(p.stat().st_size for p in tmp_path.glob("x.partial/*.bin")))
    process.terminate()
    assert process.wait(10) == 143
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("processes", [1, 2])
def test_reads_only_a_little_ahead_of_a_slow_consumer(tmp_path: Path, processes: int) -> None:
    encoder = Encoder(["text"], TokenizersEngine(NullTokenizer(9)), 10, np.dtype("uint16"), eod=9)
    read: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for line in itertools.count(1):
            read.append(line)
            yield Chunk(tmp_path, range(line, line + 1), [b'{"text": "%d"}' % (line % 9)], 13, Place(), 0.5)

    results = encode_in_order(encoder, chunks(), processes)
    for expected in range(1, 30):
        chunk, result = next(results)
        assert chunk.numbers[0] == expected
        assert result.keys[0].tokens.tolist() == [expected % 9, 9]
        assert len(read) <= expected + 4
    results.close()  # type: ignore[attr-defined]
    assert multiprocessing.active_children() == []


def test_long_lines_are_encoded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LONG", 40)
    encoder = Encoder(["text"], TokenizersEngine(NullTokenizer(9)), 10, np.dtype("uint16"), eod=None)
    lines = [b'{"text": "%b"}' % b" ".join([b"7"] * k) for k in range(1, 30)]
    chunks = [Chunk(tmp_path, range(k, k + 1), [line], len(line), Place(), 0.5) for k, line in enumerate(lines)]
    processes = set()
    monkeypatch.setattr(Encoder, "__call__", lambda self, chunk: (processes.add(os.getpid()), encode(self, chunk))[1])
    results = [result for _, result in encode_in_order(encoder, chunks, 2)]
    assert [result.keys[0].tokens.tolist() for result in results] == [[7] * k for k in range(1, 30)]
    assert processes == {os.getpid()}


def test_first_bad_line_of_the_file_is_the_one_reported(tmp_path: Path) -> None:
    lines = ['{"text": "1"}'] * 40
    lines[13] = lines[21] = '{"text": 1}'
    (tmp_path / "in").write_text("\n".join(lines))
    config = PreprocessConfig(
        input=[str(tmp_path / "in")],
        output_prefix=str(tmp_path / "x"),
        tokenizer_type="NullTokenizer",
        vocab_size=9,
        workers=2,
    )
    with pytest.raises(DataError, match=r"in:14: "):
        run(config)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
