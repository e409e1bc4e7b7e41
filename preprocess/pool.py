"""Encoding in processes beside reading and writing: results in input order, bounded memory, and an end when a process
dies.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from trimegatron.errors import DataError
from trimegatron.preprocess.encode import Encoder, Result
from trimegatron.preprocess.reader import Chunk
from trimegatron.preprocess.records import LONG

_AHEAD = 2  # chunks a process may be ahead of the slowest one: enough to keep all busy, the bound on memory


def encode_in_order(encoder: Encoder, chunks: Iterable[Chunk], processes: int) -> Iterator[tuple[Chunk, Result]]:
    """Each chunk with its encoding, in order, from ``processes`` processes, or a thread of this one if that is 1.

    Raises:
        DataError: of the first bad line in the file, or that a process died.
    """
    if processes == 1:
        yield from _in_threads(encoder, chunks, 1, ahead=_AHEAD)
        return
    with _one_thread(), _Workers(encoder, processes) as workers:
        yield from _in_threads(workers.encode, chunks, processes, ahead=processes * _AHEAD)


def _in_threads(
    work: Callable[[Chunk], Result], chunks: Iterable[Chunk], threads: int, *, ahead: int
) -> Iterator[tuple[Chunk, Result]]:
    waiting: deque[tuple[Chunk, Future[Result]]] = deque()
    executor = ThreadPoolExecutor(threads)
    try:
        for chunk in chunks:
            waiting.append((chunk, executor.submit(work, chunk)))
            if len(waiting) >= ahead:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()
    except _PipeBroken:
        first, last = waiting[0][0], waiting[-1][0]
        raise WorkerDied(
            "a worker process died (killed, or out of memory?) with lines "
            f"{first.path}:{first.numbers[0]} to {last.path}:{last.numbers[-1]} in the works; nothing was written. "
            "Fewer --workers take less memory"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


class WorkerDied(DataError):
    """A worker process ended; the input may be whole."""


class _PipeBroken(Exception):
    """A worker's end of its pipe is closed: it is dead."""


class _Workers:
    """Processes that encode, each at the end of a pipe of its own.

    So a death is seen at once, whatever the process was doing: a queue that all share would wait for the rest of what
    it was writing. A thread of ours waits at each pipe, so that neither side ever waits for the other to read.
    """

    def __init__(self, encoder: Encoder, count: int) -> None:
        self.encoder, self.here = encoder, threading.Lock()
        context: Any = multiprocessing.get_context(_start_method())
        self.pipes: list[Connection] = []
        self.processes = []
        self.free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(encoder, theirs), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: see _start_method
                process.start()
            theirs.close()  # else the pipe would outlive the process
            self.processes.append(process)
            self.pipes.append(ours)
            self.free.put(ours)

    def encode(self, chunk: Chunk) -> Result:
        if chunk.num_bytes > LONG:
            with self.here:  # one at a time, and here: on its way to another process it would be in memory twice
                return self.encoder(chunk)
        pipe = self.free.get()
        try:
            pipe.send(chunk)
            result = pipe.recv()
        except (EOFError, OSError) as error:
            raise _PipeBroken from error
        finally:
            self.free.put(pipe)
        if isinstance(result, BaseException):
            raise result
        return result

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            pipe.close()


def _start_method() -> str:
    """Forked where that is safe: the tokenizer is there at once, and in memory once.

    A thread of this interpreter might hold a lock at that moment, which nobody would release in the copy. Those of
    libraries (OpenBLAS, tokenizers) take care of that themselves, or are not used by what the workers do.
    """
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


def _serve(encoder: Encoder, pipe: Connection) -> None:
    """A worker process: chunks in, results or errors out, until the pipe's other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        try:
            result = encoder(chunk)
        except Exception as error:
            pipe.send(error)
        else:
            pipe.send(result)


def _end_with_parent() -> None:
    # Also in the middle of a long text, when the parent is killed outright.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """``tokenizers`` in one thread here and in processes started here: ``--workers`` says how many cores to use."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
