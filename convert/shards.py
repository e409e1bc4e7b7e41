"""Tensors dealt out to files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trimegatron.config.options import fail
from trimegatron.lazy import LazyTensor

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(text: str) -> int:
    """``5GB`` → bytes; units are KB, MB, GB (powers of ten) and KiB, MiB, GiB.

    Raises:
        ConfigError: it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS or float(found[1]) <= 0:
        fail("max_shard_size", text, "must be a size above 0 like 500MB, 5GB or 2GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def shards_of(tensors: Mapping[str, LazyTensor], max_bytes: int) -> list[dict[str, LazyTensor]]:
    """The tensors in their order, as few runs of them as fit ``max_bytes`` each; a larger one is a run of its own."""
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    return shards
