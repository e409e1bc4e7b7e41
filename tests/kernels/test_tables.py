"""Which launch configuration counts: the user's table, the packaged one, the heuristic; and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from trimegatron.kernels import launcher, layer_norm, source_hash, tables
from trimegatron.kernels.configs import TUNED_OPS, Config, bucket, key_of

CPU = torch.device("cpu")
SHAPE = {"hidden": 64, "total": False, "dropout": False}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No choice is made yet, and the package's tables are in ``tmp_path / "tuned"``."""
    monkeypatch.setattr(tables, "choices", {})
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()


def record(op: str = "layer_norm_forward", **changes: Any) -> dict[str, Any]:
    tuned = TUNED_OPS[op]
    found = {"op": op, "dtype": "float32", "shape": SHAPE, "config": {"rows": 2, "num_warps": 2},
             "source": source_hash.source_hash(tuned.module, tuned.kernel)}  # fmt: skip
    return found | changes


def write(path: Path, *records: Any, device: str = tables.INTERPRETER) -> Path:
    path.write_text(json.dumps({"format": tables.FORMAT, "device": device, "records": records}))
    return path


def launched(hidden: int, dtype: torch.dtype = torch.float32) -> Config:
    """What a layer norm on the CPU is launched with."""
    x, w = torch.zeros(4, hidden, dtype=dtype), torch.zeros(hidden)
    with mock.patch.object(launcher, "launch") as launch:
        layer_norm.layer_norm_forward(x, w, w, 1e-5)
    return launch.call_args.kwargs["config"]


def packaged(folder: Path, *records: Any) -> Path:
    return write(folder / "tuned" / tables.file_name(tables.INTERPRETER), *records)


def test_user_then_package_then_heuristic(tmp_path: Path) -> None:
    heuristic = launched(64)
    packaged(tmp_path, record(), record(shape=SHAPE | {"hidden": 128}))
    user = write(tmp_path / "user.json", record(config={"rows": 8, "num_warps": 1}))
    chosen = tables.choose(CPU, user)
    assert (launched(64).rows, launched(64).num_warps) == (8, 1)
    assert (launched(128).rows, launched(128).num_warps) == (2, 2)
    assert launched(256) == Config(4, 256, 4) and launched(64, torch.float16) == heuristic
    assert launched(64).columns == 64  # what a table may not set
    assert chosen.tables[0].path == user and len(chosen.settings) == 2
    tables.choose(CPU, packaged=False)
    assert launched(64) == heuristic


def test_a_record_counts_up_to_its_power_of_two(tmp_path: Path) -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]
    assert [bucket(value) for value in (False, True)] == [False, True]
    packaged(tmp_path, record())
    tuned = {hidden for hidden in range(1, 140) if launched(hidden).num_warps == 2}
    assert tuned == set(range(33, 65))


def test_only_this_device_has_its_table(tmp_path: Path) -> None:
    user = write(tmp_path / "user.json", record(), device="NVIDIA H200")
    with pytest.raises(tables.TableError, match=r"must be for this device, Triton's .*; it was made on NVIDIA H200"):
        tables.choose(CPU, user)
    assert tables.file_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert tables.choice_of(torch.device("meta")).settings == {}


def test_each_shape_is_looked_up_once(tmp_path: Path) -> None:
    packaged(tmp_path, record())
    choice = tables.choice_of(CPU)
    first = choice.config("layer_norm_forward", Config(16, 64, 4), torch.float32, SHAPE)
    with mock.patch.object(tables, "key_of", side_effect=AssertionError):
        again = choice.config("layer_norm_forward", Config(16, 64, 4), torch.float32, SHAPE)
    assert again is first == Config(2, 64, 2)


def test_another_version_of_a_kernel_is_ignored_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = packaged(tmp_path, record(source="0" * 16), record(source="1" * 16, shape=SHAPE | {"hidden": 128}))
    with caplog.at_level(logging.WARNING):
        assert launched(64).num_warps == 4 and launched(128).num_warps == 4
    (line,) = caplog.messages
    assert line.startswith(f"{path}: 2 records are of other versions of their kernels (layer_norm_forward) and are ign")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ([], 'an object with "format": 1'),
        ({"format": 2, "device": "x", "records": []}, 'an object with "format": 1'),
        ({"format": 1, "records": []}, '"device" is None'),
        ([3], "record 0: must be an object"),
        ([record(), record()], "record 1: there is another one"),
        ([record() | {"op": "matmul"}], r"record 0: op \('matmul'\) must be one of"),
        ([record(dtype="int8")], "dtype .* must be one of bfloat16"),
        ([record(shape={"hidden": 64})], "shape .* must hold hidden, total, dropout"),
        ([record(shape=SHAPE | {"hidden": 65})], "shape .* must hold powers of two"),
        ([record(config={"rows": 2})], "config .* must hold rows, num_warps"),
        ([record(config={"rows": 2, "columns": 64, "num_warps": 2})], "config .* must hold rows, num_warps"),
        ([record(config={"rows": 2, "num_warps": 5})], "num_warps \\(5\\) .* must be a power of two from 1 to 32"),
        ([record(config={"rows": True, "num_warps": 4})], "rows \\(True\\) .* must be a power of two"),
        ([record(config={"rows": 2.0, "num_warps": 4})], "config .* as whole numbers"),
        ([record(source=None)], "source"),
    ],
)  # fmt: skip
def test_malformed_tables(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "user.json"
    if isinstance(content, list) and content:
        write(path, *content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(tables.TableError, match=message) as error:
        tables.read_table(path)
    assert str(path) in str(error.value)


def test_digests_are_of_the_configurations(tmp_path: Path) -> None:
    other = record(shape=SHAPE | {"hidden": 128})
    a = write(tmp_path / "a.json", record(), other)
    b = write(tmp_path / "b.json", other, record() | {"median_s": 1.0})
    c = write(tmp_path / "c.json", other, record(config={"rows": 4, "num_warps": 2}))
    digests = [tables.choose(CPU, path).digest for path in (a, b, c)]
    assert digests[0] == digests[1] != digests[2]
    assert tables.choose(CPU).digest == "none"


def test_every_kernel_that_is_named_has_a_hash_of_its_own() -> None:
    hashes = {(op.module, op.kernel): source_hash.source_hash(op.module, op.kernel) for op in TUNED_OPS.values()}
    assert len(set(hashes.values())) == len(hashes) and all(len(text) == 16 for text in hashes.values())


def test_the_hash_is_of_the_kernel_and_what_it_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = (
        "from trimegatron.kernels import words\nfrom trimegatron.kernels.helpers import twice\n_A = 1\n"
        '@jit(do_not_specialize=["n"])\ndef kernel(x, n):\n    """Doubles."""\n'
        "    store(x, twice(load(x)) + _A + words.B)\n"
        "def other(x):\n    return x\n"
    )
    files = {"op": kernel, "helpers": "def twice(x):\n    return 2 * x\n", "words": "B, C = 2, 3\nD = 4\n"}

    def hashed(**changes: tuple[str, str]) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text.replace(*changes.get(name, ("", ""))))
        source_hash._definitions.cache_clear()
        source_hash.source_hash.cache_clear()
        return source_hash.source_hash("op", "kernel")

    monkeypatch.setattr(source_hash, "_FOLDER", tmp_path)
    try:
        first = hashed()
        assert first == hashed(op=("Doubles", "Is twice"), words=("D = 4", "D = 5  # not used"))
        assert first == hashed(op=("return x", "return -x"))
        changed = [hashed(op=("_A = 1", "_A = 2")), hashed(helpers=("2 * x", "x + x")), hashed(words=("2, 3", "5, 3")),
                   hashed(op=('["n"]', "[]"))]  # fmt: skip
        assert len({first, *changed}) == 5
    finally:
        monkeypatch.undo()
        source_hash._definitions.cache_clear()
        source_hash.source_hash.cache_clear()


def test_key_of_sorts_and_buckets() -> None:
    assert key_of("x", "float16", {"keys": 33, "dropout": True}) == ("x", "float16", (("dropout", True), ("keys", 64)))
