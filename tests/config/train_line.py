"""A small training command line and files for it, shared by the tests of the configuration."""

from __future__ import annotations

from pathlib import Path

from trimegatron.config import ExplainedConfig, read_train_args

LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64 "
    "--micro-batch-size 4 --lr 1e-3 --train-iters 20 --tokenizer-type NullTokenizer --vocab-size 500 --data-path set"
)


def make_files(folder: Path) -> None:
    """Empty files by the names the command lines use; the configuration only looks whether they are there."""
    for name in (
        "set.bin",
        "set.idx",
        "vocab.json",
        "merges.txt",
        "codeparrot_content_document.bin",
        "codeparrot_content_document.idx",
    ):
        (folder / name).touch()


def read(extra: str = "", *, line: str = LINE, world_size: int = 1, without: str = "") -> ExplainedConfig:
    """Read ``line`` without one of its options and with ``extra`` behind it."""
    words = line.split()
    if without:
        at = words.index(without)
        del words[at : at + 2]
    return read_train_args(words + extra.split(), world_size=world_size)
