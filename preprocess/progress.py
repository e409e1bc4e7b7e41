"""The lines on stderr while preprocessing runs."""

from __future__ import annotations

import sys
import time

_SECONDS = 1.0  # between two lines at least


class Progress:
    """Counts what is done and says so: after ``interval`` documents and a second at the earliest, and at the end.

    Args:
        interval: documents.
        begun: part of the whole, 0 … 1, that an earlier run did.
    """

    def __init__(self, interval: int, begun: float = 0.0) -> None:
        self.interval, self.begun = interval, begun
        self.documents = self.bytes = self.tokens = 0
        self.done = begun
        self.start = self._said_at = time.perf_counter()
        self._said = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def count(self, documents: int, num_bytes: int, tokens: int, done: float) -> None:
        """Some more is done; ``done`` is the part of the whole by now."""
        self.documents += documents
        self.bytes += num_bytes
        self.tokens += tokens
        self.done = done
        now = time.perf_counter()
        if self.documents - self._said >= self.interval and now - self._said_at >= _SECONDS:
            self._said, self._said_at = self.documents, now
            self.say()

    def say(self) -> None:
        """A line."""
        seconds = max(self.seconds, 1e-9)
        part = self.done - self.begun
        left = f"{(1 - self.done) * seconds / part:,.0f} s left" if part > 0 else "time left unknown"
        print(
            f"Processed {self.documents:,} documents, {100 * self.done:.0f} % "
            f"({self.documents / seconds:,.1f} documents/s, {self.bytes / 1e6 / seconds:,.2f} MB/s, "
            f"{self.tokens / seconds:,.0f} tokens/s, {left})",
            file=sys.stderr,
            flush=True,
        )
