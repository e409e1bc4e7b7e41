"""A run becomes a checkpoint of ours, which any layout loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from trimegatron.checkpoint.directory import (
    TOKENIZER,
    checkpoint_folder,
    flush_files,
    publish,
    temporary_folder,
)
from trimegatron.checkpoint.stored import SHARDING_KEY
from trimegatron.convert.output import Progress, whole_folder
from trimegatron.convert.shards import shards_of
from trimegatron.convert.source import Source, read_checkpoint
from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor, is_equal
from trimegatron.safetensors_file import write_safetensors

SHARD_BYTES = 2 << 30
"""Files of about this size, so that ranks share the work of reading them."""


def write_checkpoint(
    source: Source, root: Path, *, verify: bool = True, prove: Callable[[Source], None] | None = None
) -> int | None:
    """Write a folder that ``--load`` takes, with one checkpoint in it: whole or not at all, and with ``verify`` only
    when every tensor was read back from it bit for bit; returns how many.

    Args:
        prove: what else must hold of the written checkpoint; it raises where it does not.

    Raises:
        CheckpointError: the source mixes precisions, or what was written differs from it.
        ConfigError: ``root`` holds something already.
    """
    said = getattr(torch, source.config.precision.params_dtype)
    if source.dtype != said:
        raise CheckpointError(f"{source.where} holds {source.dtype} weights where its configuration says {said}")
    tensors = {f"{kind}.{name}": tensor for kind, named in source.tensors.items() for name, tensor in named.items()}
    with whole_folder(root, "--save") as temporary_root:
        iteration = source.state.progress.iteration
        temporary, final = temporary_folder(temporary_root, iteration), checkpoint_folder(temporary_root, iteration)
        temporary.mkdir()
        progress = Progress(sum(tensor.num_bytes for tensor in tensors.values()), "writing")
        entries = {}
        for number, shard in enumerate(shards_of(tensors, SHARD_BYTES)):
            where = {name: {"saved_offsets": [0] * len(tensor.shape)} for name, tensor in shard.items()}
            metadata = {"format": "pt", SHARDING_KEY: json.dumps(where)}
            path = temporary / f"shard-{number:05d}.safetensors"
            digest = hashlib.sha256()
            write_safetensors(path, shard, metadata, progress.count, digest=digest)
            entries[path.name] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
        progress.close()
        source.state.write(temporary)
        source.tokenizer.save(temporary / TOKENIZER)
        rest = [path for path in temporary.rglob("*") if path.is_file() and path.name not in entries]
        publish(temporary, final, entries | flush_files(temporary, rest))
        if not verify:
            return None
        written = read_checkpoint(temporary_root)
        count = check_same(source, written)
        if prove is not None:
            prove(written)
        return count


def check_same(source: Source, written: Source) -> int:
    """Compare two runs' tensors, bit for bit; returns how many there are.

    Raises:
        CheckpointError: one differs, or is in one of them only.
    """
    count = 0
    for kind in source.tensors.keys() | written.tensors.keys():
        mine: dict[str, LazyTensor] = source.tensors.get(kind, {})
        theirs = written.tensors.get(kind, {})
        for name in mine.keys() | theirs.keys():
            if name not in mine or name not in theirs or not is_equal(mine[name], theirs[name]):
                raise CheckpointError(f"{written.where}: {kind}.{name}, read back, is not the source's")
            count += 1
    return count
