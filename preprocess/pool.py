"""Encoding in several processes: results in input order, bounded memory, and an end when a process dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from trimegatron.errors import DataError
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.encode import Encoded, Encoder
from trimegatron.preprocess.reader import Chunk

_IN_FLIGHT = 4  # chunks per process read ahead of the slowest one: enough to keep all busy, and the bound on memory

_encoder: Encoder | None = None  # of a worker process


def encode_in_order(
    encoder: Encoder, chunks: Iterable[Chunk], config: PreprocessConfig
) -> Iterator[tuple[Chunk, list[Encoded]]]:
    """Each chunk with its encoding, in order, from ``config.workers`` processes (from this one when that is 1).

    Raises:
        DataError: of the first bad line in the file, or that a process died.
    """
    if config.workers == 1:
        with _one_thread():
            yield from ((chunk, encoder(chunk)) for chunk in chunks)
        return
    waiting: deque[tuple[Chunk, Future[list[Encoded]]]] = deque()
    # Spawned, since a forked copy of a process that runs threads (tokenizers', torch's) may hang.
    executor = ProcessPoolExecutor(
        config.workers, multiprocessing.get_context("spawn"), initializer=_start, initargs=(encoder,)
    )
    try:
        with _one_thread():
            for chunk in chunks:
                waiting.append((chunk, executor.submit(_encode, chunk)))
                if len(waiting) >= config.workers * _IN_FLIGHT:
                    yield waiting[0][0], waiting[0][1].result()
                    waiting.popleft()
            while waiting:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
    except BrokenProcessPool:
        lines = f"{waiting[0][0].first_line}-{waiting[-1][0].last_line}" if waiting else "from the first on"
        raise DataError(
            f"{config.source}: a worker process died (killed, or out of memory?) with lines {lines} in the works; "
            "nothing was written. Fewer --workers or a smaller --chunk-size take less memory"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


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


def _encode(chunk: Chunk) -> list[Encoded]:
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
