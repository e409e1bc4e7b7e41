"""Files of torch.save: their values, and nothing they ask for is run."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trimegatron.convert.torch_file import read_torch_file
from trimegatron.errors import CheckpointError

RAN: list[str] = []


def run_me(*what: str) -> None:
    RAN.append(str(what))


class Calls:
    """Pickled, it asks for a call of ``function``."""

    def __init__(self, function: Callable, *arguments: Any):
        self.what = function, arguments

    def __reduce__(self) -> tuple:
        return self.what


def save(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


def test_values_of_every_kind(tmp_path: Path):
    whole = torch.arange(60, dtype=torch.float32).view(6, 10)
    tensors = OrderedDict(
        plain=whole.clone(),
        bf16=torch.randn(3, 4).to(torch.bfloat16),
        half=torch.randn(5).half(),
        transposed=whole.t(),
        sliced=whole[2:4, 1:9:2],
        offset=whole[3:],
        number=torch.tensor(3.5),
        parameter=torch.nn.Parameter(torch.randn(2, 2)),
        empty=torch.empty(0, 3),
    )
    with_attributes = torch.randn(4)
    with_attributes.partition_dim = -1  # type: ignore[attr-defined]
    args = Namespace(dtype=torch.bfloat16, rate=0.5, names=["a"], shape=(1, 2), none=None)
    path = save(
        {"t": tensors, "x": with_attributes, "args": args, 3: "three", "random": [np.arange(5), np.float64(2.5)]},
        tmp_path / "x.pt",
    )
    content = read_torch_file(path)
    for name, tensor in tensors.items():
        mine = content["t"][name]
        expected = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        assert mine.dtype == tensor.dtype and torch.equal(mine.load(), expected), name
    assert torch.equal(content["t"]["transposed"].open()(2, 5), whole.t()[2:5])
    assert torch.equal(content["x"].load(), with_attributes)
    assert vars(content["args"]).items() >= vars(args).items()
    assert content[3] == "three"


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (Calls(run_me, "now"), r"tests\.convert\.test_torch_file\.run_me|test_torch_file\.run_me"),
        ({"model": Fraction(1, 2)}, r"fractions\.Fraction"),
        (Calls(eval, "1"), r"builtins\.eval|__builtin__\.eval"),
        (Calls(getattr, 1, "real"), r"builtins\.getattr|__builtin__\.getattr"),
        (Calls(np.lib.format.open_memmap, "x"), r"numpy\.lib.*\.open_memmap"),
    ],
)
def test_what_is_not_on_the_list_is_refused_by_name(content: Any, name: str, tmp_path: Path):
    path = save({"args": Namespace(), "x": content}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"x\.pt asks for ({name}).*not run"):
        read_torch_file(path)
    assert RAN == []


def test_a_rebuilt_tensor_calls_nothing_else(tmp_path: Path):
    """The function that Megatron's tensors name calls another one that the file names."""
    rebuild = torch._tensor._rebuild_from_type_v2
    path = save(Calls(rebuild, OrderedDict, torch.Tensor, ([("a", 1)],), {}), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="in a way that is not known"):
        read_torch_file(path)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """A copy of a zip with its records changed."""
    out = path.with_suffix(".changed")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return out


def test_damaged_files_are_refused(tmp_path: Path):
    path = save({"a": torch.randn(100, 100)}, tmp_path / "x.pt")
    data = path.read_bytes()
    (tmp_path / "short.pt").write_bytes(data[: len(data) // 2])
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"a": 1}))
    for name in ("short.pt", "text.pt", "pickle.pt", "missing.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} is not a file of torch\.save"):
            read_torch_file(tmp_path / name)
    with pytest.raises(CheckpointError, match="compressed or too few"):
        read_torch_file(rewritten(path, lambda _, record: record, zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="compressed or too few"):
        read_torch_file(rewritten(path, lambda name, record: record[:-4] if "/data/" in name else record))
    with pytest.raises(CheckpointError, match="big-endian"):
        read_torch_file(rewritten(path, lambda name, record: b"big" if name.endswith("byteorder") else record))
    with pytest.raises(CheckpointError, match=r"is (damaged|not a file)"):
        read_torch_file(rewritten(path, lambda name, record: record[:-9] if name.endswith(".pkl") else record))
    huge = save({"a": torch.as_strided(torch.zeros(1), (1000,), (0,))}, tmp_path / "s.pt")
    assert read_torch_file(huge)["a"].load().shape == (1000,)
    grown = rewritten(huge, lambda _, record: record.replace(b"K\x00\x85", b"K\x01\x85"))
    with pytest.raises(CheckpointError, match="reaches beyond its bytes"):
        read_torch_file(grown)
