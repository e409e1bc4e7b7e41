"""What this rank is doing, for who asks when it fails or hangs. A note costs a step nothing: it is an assignment."""

from __future__ import annotations


class Activity:
    """The phase that this rank is in. All ranks note the same phases in the same order, so the one with the fewest
    ``notes`` is behind."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.iteration = 0
        self.notes = 0

    def note(self, phase: str) -> None:
        """This rank enters ``phase``; the same in the same order on every rank."""
        self.phase = phase
        self.notes += 1

    def __str__(self) -> str:
        return f"iteration {self.iteration}, {self.phase}" if self.iteration else self.phase
