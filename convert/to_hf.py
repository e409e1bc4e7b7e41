"""A run becomes a folder that ``AutoModelForCausalLM.from_pretrained`` loads, proven before it appears."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from trimegatron.convert.card import model_card
from trimegatron.convert.gpt2 import gpt2_config, to_gpt2
from trimegatron.convert.output import Progress, check_free, whole_folder
from trimegatron.convert.proof import Proof, prove
from trimegatron.convert.shards import shards_of
from trimegatron.convert.source import Source, read_checkpoint
from trimegatron.convert.torch_file import save_torch_file
from trimegatron.lazy import LazyTensor, cast
from trimegatron.safetensors_file import write_safetensors

FORMATS = {"safetensors": ("model", ".safetensors"), "bin": ("pytorch_model", ".bin")}
"""Option → stem and ending of the files, as transformers looks for them."""
WORDS, HEAD = "transformer.wte.weight", "lm_head.weight"


def write_hf(
    source: Source,
    output: Path,
    *,
    dtype: str | None = None,
    format: str = "safetensors",
    max_shard_bytes: int = 5 * 10**9,
    verify: bool = True,
) -> Proof | None:
    """Convert, prove, and only then let the folder appear.

    Args:
        dtype: "float32", "bfloat16" or "float16"; the source's own without it.
        format: ``bin`` is a pickle, which only those should ask for who must.
        verify: look for damage in the source's files, and run the proof.

    Raises:
        ConfigError: ``output`` holds something already.
        CheckpointError: the source is damaged or cannot become a GPT-2, or the proof fails; nothing is left behind.
    """
    check_free(output, "--output")
    if verify and source.verify is not None:
        source.verify()
    rounded_to = source.dtype if dtype is None else getattr(torch, dtype)
    config = gpt2_config(source.config, eod=source.tokenizer.eod, dtype=str(rounded_to).removeprefix("torch."))
    model = source.config.model
    tensors = to_gpt2(source.model, num_layers=model.num_layers, num_attention_heads=model.num_attention_heads)
    tensors = {name: cast(tensor, rounded_to) for name, tensor in tensors.items()}
    with whole_folder(output, "--output") as folder:
        source.tokenizer.save(folder)
        write_weights(folder, tensors, format, max_shard_bytes)
        write_json(folder / "config.json", config)
        special = {f"{use}_token_id": source.tokenizer.eod for use in ("bos", "eos", "pad")}
        write_json(folder / "generation_config.json", special)
        proof = prove(source, folder, rounded_to=rounded_to) if verify else None
        (folder / "README.md").write_text(model_card(source, output.name, config, proof), "utf-8")
    return proof


def convert_to_hf(load: Path, output: Path, *, dtype: str | None = None, verify: bool = True) -> Proof | None:
    """:func:`write_hf` of the newest complete checkpoint of ours under ``load``."""
    return write_hf(read_checkpoint(load), output, dtype=dtype, verify=verify)


def write_weights(folder: Path, tensors: Mapping[str, LazyTensor], format: str, max_bytes: int) -> None:
    """One file, or several and the index that says which tensor is in which."""
    stem, ending = FORMATS[format]
    write = write_safetensors if format == "safetensors" else write_bin
    shards = shards_of(tensors, max_bytes)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    progress = Progress(total, "writing")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}{ending}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{ending}"
        write(folder / name, shard, {"format": "pt"}, progress.count)
        weight_map |= dict.fromkeys(shard, name)
    if format == "bin":
        weight_map[HEAD] = weight_map[WORDS]
    progress.close()
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{stem}{ending}.index.json", index)


def write_bin(
    path: Path, tensors: Mapping[str, LazyTensor], _metadata: Mapping[str, str], count: Callable[[int], None]
) -> None:
    """A file of torch.save, a pickle: its tensors are in memory together. The tied head is named beside the words, of
    which it takes no bytes: accelerate does not find it on the disk otherwise.
    """
    loaded = {name: tensor.load().contiguous() for name, tensor in tensors.items()}
    save_torch_file(loaded | ({HEAD: loaded[WORDS]} if WORDS in loaded else {}), path)
    count(sum(tensor.num_bytes for tensor in tensors.values()))


def write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
