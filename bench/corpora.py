"""What ``trimegatron bench data`` reads: text as loose JSON, a tokenizer for it, and pairs of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trimegatron.data.index_format import Header, bin_path, idx_path

STDLIB_KEY = "content"


def standard_library(folder: Path) -> Path:
    """The modules of Python's standard library as loose JSON, some 30 MB, their text under ``STDLIB_KEY``."""
    from trimegatron.demo import write_corpus

    write_corpus(folder / "stdlib.jsonl")
    return folder / "stdlib.jsonl"


def repeated(corpus: Path, copies: int, folder: Path) -> Path:
    """``corpus`` that many times over."""
    if copies == 1:
        return corpus
    path, data = folder / f"corpus-x{copies}.jsonl", corpus.read_bytes()
    with path.open("wb") as file:
        for _ in range(copies):
            file.write(data if data.endswith(b"\n") else data + b"\n")
    return path


def head(corpus: Path, megabytes: float, path: Path) -> Path:
    """The first lines of ``corpus``, about as much as asked for; itself where it is no larger."""
    if corpus.stat().st_size <= megabytes * 1e6:
        return corpus
    with corpus.open("rb") as source, path.open("wb") as target:
        while target.tell() < megabytes * 1e6 and (line := source.readline()):
            target.write(line)
    return path


def trained_tokenizer(corpus: Path, key: str, folder: Path) -> tuple[str, str]:
    """vocab.json and merges.txt of 16384 ids, learnt from the beginning of ``corpus``."""
    from trimegatron.preprocess.train_bpe import train_bpe

    train_bpe([head(corpus, 33.0, folder / "train.jsonl")], [key], 16384, folder / "tokenizer")
    return str(folder / "tokenizer" / "vocab.json"), str(folder / "tokenizer" / "merges.txt")


def write_random(prefix: Path, sizes: np.ndarray, vocab_size: int, random: np.random.Generator) -> None:
    """A pair of documents of these sizes, of random tokens."""
    random.integers(0, vocab_size, int(sizes.sum(dtype=np.int64)), np.uint16).tofile(bin_path(prefix))
    write_index(prefix, sizes)


def write_sparse(prefix: Path, sizes: np.ndarray) -> None:
    """A pair of documents of these sizes whose tokens are all 0 and take no room on the disk."""
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * int(sizes.sum(dtype=np.int64)))
    write_index(prefix, sizes)


def write_index(prefix: Path, sizes: np.ndarray) -> None:
    """The index of documents of these sizes, of uint16 tokens."""
    with idx_path(prefix).open("wb") as file:
        file.write(Header(np.dtype("<u2"), len(sizes), len(sizes) + 1).pack())
        file.write(sizes.astype("<i4").data)
        file.write((2 * (sizes.cumsum(dtype=np.int64) - sizes)).astype("<i8").data)
        file.write(np.arange(len(sizes) + 1, dtype="<i8").data)
