"""What a user is told when something cannot be done: one clear message and a documented exit code, no traceback.

Every message names the field or file, the value, the rule it breaks, and the way out.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import NoReturn


def complain(command: str, text: str, *, is_error: bool = True) -> None:
    """One message on standard error, in the form that all commands share."""
    print(f"trimegatron {command}: {'error: ' if is_error else ''}{text}", file=sys.stderr, flush=True)


def unwind_on_sigterm(command: str | None = None) -> None:
    """Make SIGTERM an exception, with exit code 143, so that what is half-written goes, or stays to be continued; it is
    said for ``command``. Only the main thread can ask for that: from others nothing changes.
    """

    def stop(*_: object) -> NoReturn:
        if command is not None:
            complain(command, "terminated", is_error=False)
        raise SystemExit(143)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


class UserError(Exception):
    """An error of the user's making. ``exit_code`` is what the process returns (see ``docs/interface.md``)."""

    exit_code = 1


class ConfigError(UserError):
    """The command or the configuration is wrong; nothing was started."""

    exit_code = 2


class DataError(UserError):
    """The data cannot be used; the message names file and line."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint cannot be used."""

    exit_code = 4


class StoppedError(UserError):
    """A signal came before there was anything to save; or another rank was told so."""

    exit_code = 143


class DivergedError(UserError):
    """Training diverged (NaN, or the loss scale at its minimum) beyond what the options allow."""

    exit_code = 5
