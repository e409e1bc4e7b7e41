"""Work beside this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(threading.Thread, Generic[T]):
    """Work in a thread that does not keep the process alive, and what came of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self.work())
        except BaseException as error:
            self.error = error

    def wait(self) -> T:
        """What came of it, once it is over; its error is raised."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.result[0]
