"""The index cache: never other data's maps, one builder at a time, damage noticed."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trimegatron.data import gpt_dataset as gpt_dataset_module
from trimegatron.data.gpt_dataset import GPTDataset, build_gpt_datasets
from trimegatron.data.index_cache import IndexCache
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.data.indices import Chunks, GPTIndices
from trimegatron.errors import DataError

SETTINGS = {"split": "8,2,0", "seq_length": 4, "seed": 1, "num_samples": (10, 3, 0)}


def write(prefix: Path, *, first: int = 1, lengths: tuple[int, ...] = (5, 7, 3, 9, 6, 5, 5, 5, 8, 8)) -> None:
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length), [length])


def build(prefix: Path, lines: list[str] | None = None, **changes: object) -> GPTDataset:
    log = (lines if lines is not None else []).append
    train, _, _ = build_gpt_datasets(prefix, log=log, **(SETTINGS | changes))  # type: ignore[arg-type]
    assert train is not None
    return train


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever maps are built."""
    calls: list[int] = []
    original = gpt_dataset_module.stream_indices

    def counted(*args: object) -> Iterator[np.ndarray | Chunks]:
        calls.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(gpt_dataset_module, "stream_indices", counted)
    return calls


def same(a: GPTDataset, b: GPTDataset) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.indices, b.indices, strict=True))


def test_second_start_reads_what_the_first_built(tmp_path: Path, builds: list[int]) -> None:
    write(tmp_path / "x")
    first = build(tmp_path / "x")
    assert len(builds) == 2  # train and valid
    assert same(build(tmp_path / "x"), first)
    assert len(builds) == 2
    names = {p.name.split("-", 1)[1] for p in (tmp_path / "x" / "cache" / "GPTDataset_indices").glob("*.npy")}
    assert names == {f"GPTDataset-{s}-{field}.npy" for s in ("train", "valid") for field in GPTIndices._fields}


@pytest.mark.parametrize("change", [{"seed": 2}, {"seq_length": 5}, {"num_samples": (30, 3, 0)}, {"split": "7,3,0"}])
def test_every_setting_is_part_of_the_key(tmp_path: Path, builds: list[int], change: dict[str, object]) -> None:
    write(tmp_path / "x")
    build(tmp_path / "x")
    build(tmp_path / "x", **change)
    assert len(builds) in (3, 4)  # the validation samples are part of num_samples, but not of the training set's key


@pytest.mark.parametrize("change", [{"first": 2}, {"lengths": (7, 5, 3, 9, 6, 5, 5, 5, 8, 8)}])
def test_new_data_under_the_old_name_is_never_served_old_maps(
    tmp_path: Path, builds: list[int], change: dict[str, object]
) -> None:
    write(tmp_path / "x")
    build(tmp_path / "x")
    write(tmp_path / "x", **change)  # type: ignore[arg-type]
    again = build(tmp_path / "x")
    assert len(builds) == 4
    assert same(again, build(tmp_path / "x", cache_dir=tmp_path / "fresh"))


def test_what_changes_no_array_is_not_part_of_the_key(tmp_path: Path, builds: list[int]) -> None:
    write(tmp_path / "x")
    build(tmp_path / "x")
    build(tmp_path / "x", num_samples=(9, 3, 0), split="80,20,0", impl="lazy")  # as many epochs, the same documents
    assert len(builds) == 2


def test_copied_data_and_cache_are_recognised(tmp_path: Path, builds: list[int]) -> None:
    write(tmp_path / "x")
    build(tmp_path / "x", cache_dir=tmp_path / "cache")
    (tmp_path / "node").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "node" / f"y{suffix}").write_bytes((tmp_path / f"x{suffix}").read_bytes())
    build(tmp_path / "node" / "y", cache_dir=tmp_path / "cache")
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty", "description"])
def test_damage_is_noticed_and_repaired(tmp_path: Path, builds: list[int], damage: str) -> None:
    write(tmp_path / "x")
    first = build(tmp_path / "x", cache_dir=tmp_path / "cache")
    expected = GPTIndices(*(np.array(a) for a in first.indices))
    path = next((tmp_path / "cache").glob("*-train-sample_index.npy"))
    content = path.read_bytes()
    match damage:
        case "truncate":
            path.write_bytes(content[:-3])
        case "flip":
            path.write_bytes(content[:-3] + b"\x7f" + content[-2:])
        case "remove":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "description":
            path = next((tmp_path / "cache").glob("*-train-description.json"))
            path.write_text("{")
    lines: list[str] = []
    again = build(tmp_path / "x", lines, cache_dir=tmp_path / "cache")
    assert len(builds) == 3
    assert any(str(path) in line and "broken" in line for line in lines)
    for a, b in zip(again.indices, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_folder_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    write(tmp_path / "x")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"--data-cache-path"):
        build(tmp_path / "x", cache_dir=tmp_path / "file" / "cache")


def test_whole_cache_in_a_read_only_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x")
    first = build(tmp_path / "x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert same(build(tmp_path / "x"), first)
    with pytest.raises(DataError, match=r"Permission denied.*--data-cache-path"):
        build(tmp_path / "x", seed=5)


def _maps(value: int) -> GPTIndices:
    return GPTIndices(np.full(3, value, np.int32), np.zeros((2, 2), np.int32), np.zeros(1, np.uint32))


def _slow_builder(folder: Path, seconds: float, report: multiprocessing.SimpleQueue) -> None:
    lines: list[str] = []

    def build_slowly() -> GPTIndices:
        report.put(("builds", os.getpid()))
        time.sleep(seconds)
        return _maps(os.getpid() % 1000)

    maps = IndexCache(folder, "t", GPTIndices, {"a": 1}, lines.append).load_or_build(build_slowly)
    report.put(("done", int(maps.document_index[0]), lines))


def _next(report: multiprocessing.SimpleQueue) -> tuple:
    """What a child reports; the test fails where it died without a word."""
    end = time.monotonic() + 20
    while report.empty():
        assert time.monotonic() < end, "no report in 20 s"
        time.sleep(0.01)
    return report.get()


def test_simultaneous_processes_build_once_and_agree(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    report = context.SimpleQueue()
    processes = [context.Process(target=_slow_builder, args=(tmp_path, 0.4, report)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    events = [_next(report) for _ in range(5)]
    assert [event[0] for event in events].count("builds") == 1
    done = [event for event in events if event[0] == "done"]
    assert len({event[1] for event in done}) == 1
    waited = [line for event in done for line in event[2]]
    assert len(waited) == 3
    assert all("waits for another" in line and ".lock" in line for line in waited)


def test_killed_builder_leaves_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    report = context.SimpleQueue()
    process = context.Process(target=_slow_builder, args=(tmp_path, 60, report))
    process.start()
    assert _next(report)[0] == "builds"
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    started = time.monotonic()
    maps = IndexCache(tmp_path, "t", GPTIndices, {"a": 1}, print).load_or_build(lambda: _maps(5))
    assert maps.document_index.tolist() == [5, 5, 5]
    assert time.monotonic() - started < 5


def test_lock_is_held_only_while_building(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path, "t", GPTIndices, {"a": 1}, print)
    cache.load_or_build(lambda: _maps(5))
    with cache.lock_file.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises when still held
    assert json.loads(cache.description_file.read_text())["a"] == 1


def _build_in_child(prefix: Path, cache: Path, report: multiprocessing.SimpleQueue) -> None:
    lines: list[str] = []
    train = build(prefix, lines, cache_dir=cache)
    report.put([train[i].tolist() for i in range(3)])


def test_twenty_pairs_that_start_at_once(tmp_path: Path) -> None:
    write(tmp_path / "x")
    expected = [build(tmp_path / "x", cache_dir=tmp_path / "alone")[i].tolist() for i in range(3)]
    context = multiprocessing.get_context("fork")
    for pair in range(20):
        report = context.SimpleQueue()
        both = [
            context.Process(target=_build_in_child, args=(tmp_path / "x", tmp_path / str(pair), report))
            for _ in range(2)
        ]
        for process in both:
            process.start()
        assert [_next(report), _next(report)] == [expected, expected]
        for process in both:
            process.join(10)
        assert len(list((tmp_path / str(pair)).glob("*.npy"))) == 6
        assert not list((tmp_path / str(pair)).glob("*.tmp")) + list((tmp_path / str(pair)).glob(".*.tmp"))


def test_what_a_killed_builder_left_is_cleared_away(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path, "t", GPTIndices, {"a": 1}, print)
    left = [tmp_path / f".{cache.files[0].name}.{host}-77.tmp" for host in (platform.node(), "other")]
    for path in left:
        path.touch()
    cache.load_or_build(lambda: _maps(5))
    assert [path.exists() for path in left] == [False, True]  # another node's may be in the making


def test_without_locks_each_builds_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lines: list[str] = []
    maps = IndexCache(tmp_path, "t", GPTIndices, {"a": 1}, lines.append).load_or_build(lambda: _maps(5))
    assert maps.document_index.tolist() == [5, 5, 5]
    assert any("has no locks" in line for line in lines)
