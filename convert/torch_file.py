"""Files of ``torch.save``, read without running anything that the file asks for.

A pickle names the functions and classes that build its objects. This reader knows a short list of them and puts
something inert in the place of each: no module is imported, no class of another package is made, and a name that is
not on the list is refused. Tensors stay in the file: their bytes lie in the zip as they are, and are read by slice.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimegatron.errors import CheckpointError
from trimegatron.files import sync_file
from trimegatron.lazy import LazyTensor, Rows, in_file

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
    "half",
    "float",
)
INERT = {
    ("argparse", "Namespace"),
    ("signal", "Signals"),
    ("pathlib", "PosixPath"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("_codecs", "encode"),
    ("torch", "device"),
    ("torch", "Tensor"),
    ("torch", "Size"),
}
"""What Megatron-LM's files name beside tensors: settings and random states, of which only the attributes are read."""
INERT_PACKAGE = "megatron."
"""Its enumerations: which modules they are in changed over the years."""


class Inert:
    """Stands for an object of a class that is not known here: what it was made of, and its attributes."""

    def __init__(self, *made_of: Any):
        self.made_of = made_of

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


@dataclass(frozen=True)
class Storage:
    """The bytes that tensors of a file share."""

    start: int
    num_elements: int
    dtype: torch.dtype


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The object in a file of ``torch.save``, with each tensor as a :class:`LazyTensor`.

    Args:
        start, length: where in the file the archive lies, in bytes; without them it is the file.

    Raises:
        CheckpointError: the file is cut short or no such file, or its pickle names something that is not on the list.
    """
    with refusing_damage(path, "a file of torch.save (1.6 or newer)"), path.open("rb") as file:
        content = file if length is None else io.BufferedReader(_Slice(file, start, length))
        with zipfile.ZipFile(content) as archive:
            return _TorchUnpickler(path, archive, start).load()


@contextmanager
def refusing_damage(path: Path, kind: str) -> Iterator[None]:
    """Whatever reading a damaged pickle raises becomes a CheckpointError with the file's name."""
    try:
        yield
    except (zipfile.BadZipFile, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is not {kind} that can be read: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def save_torch_file(content: Any, path: Path, pickle_module: Any = pickle) -> None:
    """Write a file of torch.save and flush it to the disk. Raises OSError."""
    try:
        torch.save(content, path, pickle_module=pickle_module)
    except RuntimeError as error:  # what the library makes of a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    sync_file(path)


def is_zip(path: Path) -> bool:
    """Whether a file is of ``torch.save``'s format since 1.6."""
    return zipfile.is_zipfile(path)


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int):
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = max(0, offset + (0, self.position, self.length)[whence])
        return self.position

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.start + self.position)
        part = self.file.read(max(0, min(len(buffer), self.length - self.position)))
        buffer[: len(part)] = part
        self.position += len(part)
        return len(part)


class RestrictedUnpickler(pickle.Unpickler):
    """Reads a pickle that may name what is ``known``, and gets that for it; nothing is imported."""

    def __init__(self, path: Path, data: bytes, known: Mapping[tuple[str, str], Any]):
        super().__init__(io.BytesIO(data))
        self.path, self.known = path, dict(known)

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for what the pickle names."""
        if (module, name) not in self.known and f"{module}.".startswith(INERT_PACKAGE):
            self.known[module, name] = inert(name)
        if (module, name) not in self.known:
            raise CheckpointError(
                f"{self.path} asks for {module}.{name}, which no checkpoint of this kind needs. It was not run; do not "
                "load this file elsewhere unless you trust its origin"
            )
        return self.known[module, name]


def inert(name: str) -> type[Inert]:
    """A stand-in of that name, made anew for each file, so that no file can change it for the next."""
    return type(name, (Inert,), {})


class _TorchUnpickler(RestrictedUnpickler):
    """Reads one archive of torch.save's."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, start: int):
        names = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(names) != 1:
            raise CheckpointError(f"{path} is a zip but not one of torch.save: it holds {len(names)} data.pkl")
        self.archive, self.start = archive, start
        self.root = names[0].removesuffix("data.pkl")
        super().__init__(path, archive.read(names[0]), self._known())
        if f"{self.root}byteorder" in archive.namelist() and archive.read(f"{self.root}byteorder") != b"little":
            raise CheckpointError(f"{path} was written on a big-endian machine; load and save it on another")

    def _known(self) -> dict[tuple[str, str], Any]:
        def rebuild_tensor(storage: Storage, offset: int, size: tuple, stride: tuple, *_: Any) -> LazyTensor:
            return self.tensor(storage, offset, tuple(size), tuple(stride))

        def rebuild_subclass(function: Callable, _kind: Any, arguments: tuple, _state: Any) -> LazyTensor:
            if function is not rebuild_tensor:
                raise CheckpointError(f"{self.path} builds a tensor in a way that is not known")
            return rebuild_tensor(*arguments)

        def rebuild_parameter(data: LazyTensor, *_: Any) -> LazyTensor:
            return data

        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): rebuild_subclass,
        }
        known |= {("torch", name): dtype for name, dtype in STORAGES.items()}
        known |= {("torch", name): getattr(torch, name) for name in DTYPES}
        known |= {name: inert(name[1]) for name in INERT}
        return known

    def persistent_load(self, reference: Any) -> Storage:
        """Where the bytes of a storage lie: the zip holds them as they are, not compressed."""
        kind, dtype, key, _, num_elements = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.path} refers to {kind!r}, not to the bytes of tensors")
        record = self.archive.getinfo(f"{self.root}data/{key}")
        if record.compress_type != zipfile.ZIP_STORED or record.file_size < num_elements * dtype.itemsize:
            raise CheckpointError(f"{self.path}: the bytes of tensor {key} are compressed or too few")
        place = self.start + record.header_offset
        with self.path.open("rb") as file:
            file.seek(place)
            header = file.read(30)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return Storage(place + 30 + lengths, num_elements, dtype)

    def tensor(self, storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> LazyTensor:
        """A view of a storage; one that does not lie row after row is read whole."""
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if min((offset, *size, *stride)) < 0 or (0 not in size and last >= storage.num_elements):
            raise CheckpointError(f"{self.path}: a tensor of shape {list(size)} reaches beyond its bytes")
        if not size:
            size, stride = (1,), (1,)
        start = storage.start + offset * storage.dtype.itemsize
        contiguous, expected = True, 1
        for n, step in zip(reversed(size), reversed(stride), strict=True):
            contiguous = contiguous and (n == 1 or step == expected)
            expected *= n
        if contiguous:
            return in_file(self.path, start, size, storage.dtype)

        def open_strided() -> Rows:
            whole = in_file(self.path, start, (last - offset + 1,), storage.dtype).load().as_strided(size, stride)
            return lambda first, last: whole[first:last]

        return LazyTensor(size, storage.dtype, open_strided)
