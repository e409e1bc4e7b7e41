"""The file of lines that were left out, ``--on-bad-line skip``: one JSON object a line, with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trimegatron.preprocess.encode import Reject
from trimegatron.preprocess.reader import Chunk

REJECTS = "rejects.jsonl"


class Rejects:
    """Collects them in the working folder; there is no file without any.

    Args:
        folder: the working folder.
        state: of an earlier run, to go on from.
    """

    def __init__(self, folder: Path, state: Sequence[int] | None = None) -> None:
        self.count, size = state or (0, 0)
        self._path = folder / REJECTS
        self._file = self._path.open("ab")
        self._file.truncate(size)

    def add(self, chunk: Chunk, rejects: Sequence[Reject]) -> None:
        """``{"file": …, "line": …, "reason": …, "text": the line}``; bytes that are not UTF-8 are shown as \\\\xNN."""
        for reject in rejects:
            text = reject.raw.decode(errors="backslashreplace")
            row = {"file": str(chunk.path), "line": reject.number, "reason": reject.reason, "text": text}
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self.count += 1

    def state(self) -> list[int]:
        """How many there are and the size of the file, which is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return [self.count, self._path.stat().st_size]

    def close(self) -> None:
        """Complete the file."""
        self._file.close()
        if not self.count:
            self._path.unlink()
