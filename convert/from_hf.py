"""A local GPT-2 family folder of Hugging Face's → a run that training can go on from at any layout."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimegatron.convert.gpt2 import config_from_gpt2, from_gpt2
from trimegatron.convert.proof import Proof, prove
from trimegatron.convert.source import MODEL, Source, new_state
from trimegatron.convert.to_ours import write_checkpoint
from trimegatron.convert.torch_file import is_zip, read_torch_file
from trimegatron.convert.vocabulary import VocabularyConfig, find_tokenizer
from trimegatron.errors import CheckpointError, ConfigError, complain
from trimegatron.lazy import LazyTensor, assemble, in_memory
from trimegatron.safetensors_file import read_safetensors

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers prefers them."""


def read_hf(folder: Path, files: VocabularyConfig | None = None) -> Source:
    """The model in ``folder``, with its tokenizer unless ``files`` names another.

    Raises:
        CheckpointError: it is no GPT-2 of ours, a file is missing or damaged, or a tensor has no place.
        ConfigError: there is no tokenizer, or it is of another vocabulary.
    """
    values = read_json(folder / "config.json")
    if values.get("model_type") != "gpt2":
        raise CheckpointError(f"{folder} is a {values.get('model_type')!r} model; only the GPT-2 family is supported")
    tensors = read_weights(folder)
    dtypes = {tensor.dtype for name, tensor in tensors.items() if name.endswith("wte.weight")}
    dtype = dtypes.pop() if dtypes else torch.float32
    files = files or VocabularyConfig()
    tokenizer = find_tokenizer(files, folder, where=folder)
    config = config_from_gpt2(values, dtype=dtype, tokenizer_type=tokenizer.type)
    model = from_gpt2(tensors, config, where=folder)
    rows, size = values["vocab_size"], tokenizer.vocab_size
    if size > rows or (size < rows and files.true_vocab_size is None):
        raise ConfigError(
            f"{folder} has {rows} words and its tokenizer {size}. Give the tokenizer it was trained with"
            + (f", or --true-vocab-size {size} to leave out the rest" if size < rows else "")
        )
    config = replace(config, model=replace(config.model, vocab_size=size))
    words = "embedding.word_embeddings.weight"
    model[words] = assemble((size, config.model.hidden_size), [((0, 0), model[words])])
    return Source(folder, config, new_state(config), tokenizer, {MODEL: model})


def read_weights(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a folder, of one file or of those that an index names.

    Raises:
        CheckpointError: there is no such file, or the index and the files do not agree.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return read_file(folder / name)
        if not (folder / f"{name}.index.json").is_file():
            continue
        weight_map: dict[str, str] = read_json(folder / f"{name}.index.json").get("weight_map", {})
        files = {file: read_file(safe_join(folder, file)) for file in sorted(set(weight_map.values()))}
        found = {tensor: file for file, tensors in files.items() for tensor in tensors}
        different = sorted(name for name in weight_map.keys() | found.keys() if weight_map.get(name) != found.get(name))
        if different or sum(map(len, files.values())) != len(found):
            raise CheckpointError(f"{folder}: the index and the files do not agree on {', '.join(different[:8])}")
        return {tensor: files[file][tensor] for tensor, file in weight_map.items()}
    raise CheckpointError(f"{folder} holds none of {', '.join(WEIGHTS)}, nor an index of one")


def safe_join(folder: Path, name: str) -> Path:
    """A file that an index names, which must lie in the folder."""
    if Path(name).name != name:
        raise CheckpointError(f"{folder}: its index names the file {name}, which is not in the folder")
    return folder / name


def read_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file. A pickle can ask for tensors only, of either of torch.save's formats."""
    if path.suffix == ".safetensors":
        return read_safetensors(path).tensors
    if is_zip(path):
        content = read_torch_file(path)
    else:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        content = {name: in_memory(value) for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not isinstance(content, dict) or not all(isinstance(value, LazyTensor) for value in content.values()):
        raise CheckpointError(f"{path} is not a table of tensors")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def convert_from_hf(
    folder: Path, root: Path, files: VocabularyConfig | None = None, *, verify: bool = True
) -> Proof | None:
    """Write a checkpoint that computes what transformers computes from ``folder`` in a fresh process.

    Raises:
        CheckpointError: the model is none of ours, is damaged, or the proof fails; nothing is left behind.
        ConfigError: the tokenizer is missing or another, or ``root`` holds something already.
    """
    proofs: list[Proof] = []
    source = read_hf(folder, files)
    write_checkpoint(source, root, verify=verify, prove=lambda written: proofs.append(prove(written, folder, cut=True)))
    theirs, ours = read_json(folder / "config.json").get("eos_token_id"), source.tokenizer.eod
    if theirs is not None and theirs != ours:
        line = (
            f"{folder / 'config.json'} names {theirs} as eos_token_id and the tokenizer {ours}, which counts from now"
        )
        complain("convert", f"{line} on; to change it, name another eos_token in tokenizer_config.json", is_error=False)
    return proofs[0] if proofs else None
