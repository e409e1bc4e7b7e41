"""Encoding beside reading and writing, in threads or processes: results in input order, bounded memory, and an end when
a process dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext

from trimegatron.errors import DataError
from trimegatron.preprocess.encode import Encoder, Result
from trimegatron.preprocess.reader import Chunk

_THREADS = 2  # one parses while the engine works for the other, outside the interpreter
_AHEAD = 2  # chunks a thread or process may be ahead of the slowest one: enough to keep all busy, the bound on memory

_encoder: Encoder | None = None  # of a worker process


def encode_in_order(encoder: Encoder, chunks: Iterable[Chunk], processes: int) -> Iterator[tuple[Chunk, Result]]:
    """Each chunk with its encoding, in order, from ``processes`` processes, or two threads of this one if that is 1.

    Raises:
        DataError: of the first bad line in the file, or that a process died.
    """
    waiting: deque[tuple[Chunk, Future[Result]]] = deque()
    executor: Executor
    work: Callable[[Chunk], Result]
    if processes == 1:
        executor, work, ahead = ThreadPoolExecutor(_THREADS), encoder, _THREADS + 1
    else:
        # Spawned, since a forked copy of a process that runs threads (tokenizers', torch's) may hang.
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(encoder,))
        work, ahead = _encode, processes * _AHEAD
    try:
        with _one_thread() if processes > 1 else nullcontext():
            for chunk in chunks:
                waiting.append((chunk, executor.submit(work, chunk)))
                if len(waiting) >= ahead:
                    yield waiting[0][0], waiting[0][1].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
    except BrokenProcessPool:
        where = "from the first line on"
        if waiting:
            first, last = waiting[0][0], waiting[-1][0]
            where = f"with lines {first.path}:{first.numbers[0]} to {last.path}:{last.numbers[-1]} in the works"
        raise WorkerDied(
            f"a worker process died (killed, or out of memory?) {where}; nothing was written. Fewer --workers take "
            "less memory"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


class WorkerDied(DataError):
    """A worker process ended; the input may be whole."""


def _start(encoder: Encoder) -> None:
    """In a new worker process."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A pool's workers wait for tasks for ever when their parent is killed outright.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(chunk: Chunk) -> Result:
    assert _encoder is not None
    return _encoder(chunk)


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
