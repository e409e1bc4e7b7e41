"""Output that appears whole or not at all, and how far the writing is."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trimegatron.errors import ConfigError
from trimegatron.files import sync_folder

WIDTH = 30
SECONDS_BETWEEN_LINES = 10.0


def check_free(output: Path, flag: str) -> None:
    """Refuse a folder that holds something.

    Raises:
        ConfigError: it does.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{flag} ({output}) must not exist yet, or be empty. Give another folder, or remove it first")


@contextmanager
def whole_folder(output: Path, flag: str) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its name at the end; where something fails it goes, with the
    folders above that were made for it.
    """
    check_free(output, flag)
    output = output.resolve()
    made = [folder for folder in output.parents if not folder.exists()]
    # Not named by the process: in a container the next one has the number of that which was killed.
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if output.exists():
            output.rmdir()
        temporary.rename(output)
        sync_folder(output.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:  # a folder that holds something stays
            with suppress(OSError):
                folder.rmdir()


class Progress:
    """A bar on a terminal, a line now and then elsewhere: bytes written of all that will be."""

    def __init__(self, total: int, what: str):
        self.total, self.what = max(1, total), what
        self.done = 0
        self.started = time.perf_counter()
        self.is_terminal = sys.stderr.isatty()
        self.said_at = self.started

    def count(self, num_bytes: int) -> None:
        """So much more is written."""
        self.done += num_bytes
        now = time.perf_counter()
        if now - self.said_at >= (0.1 if self.is_terminal else SECONDS_BETWEEN_LINES):
            self.said_at = now
            self.say("\r" if self.is_terminal else "", "" if self.is_terminal else "\n")

    def say(self, start: str, end: str) -> None:
        part = min(1.0, self.done / self.total)
        seconds = max(1e-9, time.perf_counter() - self.started)
        bar = "#" * round(part * WIDTH)
        left = (1 - part) * seconds / part if part else 0.0
        print(
            f"{start}{self.what} [{bar:{WIDTH}}] {part:4.0%}, {self.done / 1e6:,.0f} MB, "
            f"{self.done / 1e6 / seconds:,.0f} MB/s, {left:,.0f} s left",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Ends the bar's line."""
        if self.is_terminal:
            self.say("\r", "\n")
