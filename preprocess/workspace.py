"""The folder ``PREFIX.partial``: everything a run writes before its output appears, and how far it has come.

``state.json`` in it says where reading goes on and how much of each file counts; it is written every few seconds, after
the files themselves are on the disk. So a run that was stopped at any moment can be continued, to the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from trimegatron.errors import ConfigError, DataError
from trimegatron.files import write_atomically

INTERVAL = 10.0  # seconds between two states: what is lost at most


class Workspace:
    """The working folder of one run, locked against a second one.

    Args:
        prefix: of the output.
        identity: what the bytes of the output depend on; a run is continued only if all of it is the same.
        resume: True continues what is there, False throws it away, None refuses.

    Raises:
        ConfigError: another run is at work there, there is something to continue and ``resume`` does not say what to
            do, or it belongs to other options or input.
    """

    def __init__(self, prefix: str, identity: dict[str, Any], resume: bool | None) -> None:
        self.path = Path(f"{prefix}.partial")
        self.identity = json.loads(json.dumps(identity))
        self.path.mkdir(exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise ConfigError(f"{self.path}: another run is writing to the same --output-prefix.") from None
        try:
            self.state = self._find(resume)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._saved = time.monotonic()

    def _find(self, resume: bool | None) -> dict[str, Any] | None:
        file = self.path / "state.json"
        state = None
        if file.is_file() and resume is not False:
            try:
                state = json.loads(file.read_text("utf-8"))
            except ValueError as error:
                raise DataError(f"{file}: cannot be read ({error}). Start over with --no-resume.") from error
        if state is None:
            for path in self.path.iterdir():
                path.unlink()
            return None
        if resume is None:
            raise ConfigError(
                f"{self.path} holds an unfinished run ({100 * state['done']:.0f} % done). Add --resume to continue it "
                "or --no-resume to start over."
            )
        other = [k for k in self.identity if self.identity[k] != state["identity"].get(k)]
        if other:
            raise ConfigError(
                f"--resume: the unfinished run in {self.path} had other {', '.join(other)}: "
                f"{json.dumps(state['identity'].get(other[0]))}, now {json.dumps(self.identity[other[0]])}. Give the "
                "same again, or start over with --no-resume."
            )
        return state

    @property
    def due(self) -> bool:
        """It is time to save a state."""
        return time.monotonic() - self._saved >= INTERVAL

    @property
    def worth_keeping(self) -> bool:
        """A state has been saved."""
        return (self.path / "state.json").is_file()

    def save(self, state: dict[str, Any]) -> None:
        """Say how far the run has come; everything it counts on must be on the disk."""
        write_atomically(self.path / "state.json", json.dumps({"identity": self.identity, **state}))
        self._saved = time.monotonic()

    def close(self, remove: bool) -> None:
        """Unlock; the folder goes unless there is something to continue."""
        if remove:
            shutil.rmtree(self.path)
        os.close(self._descriptor)
