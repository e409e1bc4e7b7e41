"""safetensors files, read by slice and written tensor after tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from trimegatron.errors import CheckpointError
from trimegatron.lazy import LazyTensor, bytes_of, in_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What weights and moments may be stored as, and the causal masks of older models."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Contents(NamedTuple):
    """What a file holds: tensors by name, and text."""

    tensors: dict[str, LazyTensor]
    metadata: dict[str, str]


def read_safetensors(path: Path) -> Contents:
    """A file of tensors; only its header is read now.

    Raises:
        CheckpointError: it is no safetensors file, is cut short, or holds something other than these.
    """
    try:
        with safe_open(path, framework="pt"):  # the library checks the header against the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file that can be read: {error}") from error
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{path}: {name} is {entry['dtype']}; a model's tensors are {', '.join(DTYPES)}")
        start = 8 + length + entry["data_offsets"][0]
        tensors[name] = in_file(path, start, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    return Contents(tensors, metadata)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    count: Callable[[int], None],
    *,
    digest: Any = None,
) -> None:
    """Write a file and flush it to the disk.

    Args:
        count: is told of the bytes of tensors as they are written.
        digest: an object of hashlib's that is to see the file; a thread feeds it beside the writing.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # stable; keeps every tensor aligned
    for name, tensor in ordered:
        end = position + tensor.num_bytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:

        def write(data: memoryview | bytes) -> None:
            seen = None if digest is None else beside.submit(digest.update, data)
            written = 0
            while written < len(data):  # the system may take less than it is given
                written += file.write(memoryview(data)[written:])
            if seen is not None:
                seen.result()

        write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            for chunk in tensor.chunks():
                data = bytes_of(chunk.contiguous())
                write(data)
                count(len(data))
        os.fsync(file.fileno())
