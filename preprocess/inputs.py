"""The input files of a run: names, globs and folders; plain, gzip, bzip2, xz and Zstandard."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trimegatron.config.options import fail
from trimegatron.errors import ConfigError, DataError

_PACKED = (".gz", ".bz2", ".xz", ".zst")
_IN_FOLDERS = (".json", ".jsonl", ".ndjson")
_COMPRESSED_READ = 1 << 18
_TYPICAL_RATIO = 5  # of text to its packed form, where sizes must be guessed


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: Path

    @property
    def packed(self) -> bool:
        return self.path.suffix in _PACKED

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        return self.path.stat().st_size

    @property
    def text_bytes(self) -> int:
        """About how many bytes of JSON it holds."""
        return self.num_bytes * (_TYPICAL_RATIO if self.packed else 1)

    @contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, BinaryIO]]:
        """The unpacked bytes, and the file on the disk, whose position tells how much is done.

        Raises:
            DataError: the file is not what its name says, is cut short, or cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                yield self._unpack(file), file
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the system, not of what the file holds
            raise DataError(f"{self.path}: not a whole {self.path.suffix} file ({error})") from error

    def _unpack(self, file: BinaryIO) -> Any:
        suffix = self.path.suffix
        if suffix == ".gz":
            return gzip.GzipFile(fileobj=file)
        if suffix == ".bz2":
            return bz2.BZ2File(file)
        if suffix == ".xz":
            return lzma.LZMAFile(file)
        return io.BufferedReader(_Zstandard(file), _COMPRESSED_READ) if suffix == ".zst" else file


class _Zstandard(io.RawIOBase):
    """All frames of a .zst file. The package's own reader takes the end of a file that is cut short for the end."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._new, self._error = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._file, self._frame, self._ready, self._begun = file, self._new(), memoryview(b""), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._fill():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _fill(self) -> bool:
        packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame, self._begun = self._new(), False
        packed = packed or self._file.read(_COMPRESSED_READ)
        if not packed:
            if self._begun:
                raise EOFError("it ends within a frame")
            return False
        self._begun = True
        try:
            self._ready = memoryview(self._frame.decompress(packed))
        except self._error as error:
            raise EOFError(str(error)) from error
        return True


def find_sources(names: Sequence[str]) -> list[Source]:
    """The files that ``--input`` means, in the order given; those of a glob or folder sorted by name.

    Of a folder (and the folders in it) the files named .json, .jsonl or .ndjson count, packed or not.

    Raises:
        ConfigError: nothing is there, a file comes twice, or the package for .zst is missing.
    """
    paths: list[Path] = []
    for name in names:
        found = _expand(name)
        again = next((path for path in found if path in paths), None)
        if again is not None:
            fail("input", name, "must not name a file twice", f"{again} is there already")
        paths += found
    zst = next((path for path in paths if path.suffix == ".zst"), None)
    if zst is not None:
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"--input ({zst}) needs the zstandard package: pip install 'trimegatron[zstd]', or unpack it first."
            ) from None
    return [Source(path) for path in paths]


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".") and _is_json(p)]
        if not found:
            fail("input", name, f"must hold {', '.join(_IN_FOLDERS)} files, packed or not; there are none")
        return found
    if path.is_file():
        return [path]
    found = sorted(Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file())  # noqa: PTH207 (of any root)
    if not found:
        fail("input", name, "must be a file, a folder or a glob; there is none of that name")
    return found


def _is_json(path: Path) -> bool:
    return (path.with_suffix("") if path.suffix in _PACKED else path).suffix in _IN_FOLDERS
