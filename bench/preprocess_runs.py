"""The preprocessing runs of ``trimegatron bench data``, each made for a process of its own: ours and the others'.

Each does its imports, loads what is not to be timed, times, and returns seconds, peak memory and a sha256 of the
result.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.bench.measure import Figures, peak_memory, sha256
from trimegatron.byte_level import END_OF_TEXT
from trimegatron.data.index_format import best_dtype, bin_path


def preprocess(
    path: str, key: str, vocab_file: str, merge_file: str, output: str, workers: int, engine: str | None
) -> Figures:
    """Ours, from JSON to .bin and .idx. ``engine`` None: the only one there is."""
    from trimegatron.preprocess.config import PreprocessConfig
    from trimegatron.preprocess.run import run

    chosen: dict[str, Any] = {} if engine is None else {"tokenizer_engine": engine}
    config = PreprocessConfig(
        input=[path],
        json_keys=[key],
        output_prefix=output,
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=vocab_file,
        merge_file=merge_file,
        workers=workers,
        log_interval=10**9,
        **chosen,
    )
    load_engine(engine)
    started = time.perf_counter()
    run(config)
    figures: Figures = {"seconds": time.perf_counter() - started, **peak_memory()}
    tokens = np.fromfile(bin_path(f"{output}_{key}_document"), best_dtype(config.tokenizer().vocab_size))
    return figures | {"tokens": len(tokens), "ids": sha256(tokens.astype(np.int32))}


def load_engine(engine: str | None) -> None:
    """Import what the run will need, since imports are not timed."""
    importlib.import_module("tokenizers")
    if engine == "gigatoken":
        importlib.import_module("gigatoken")
        importlib.import_module("awkward")  # which it imports itself when it is first used


def preprocess_engines() -> list[str | None]:
    """Engines that this version's ``preprocess`` knows and this machine has."""
    from trimegatron.preprocess.config import PreprocessConfig

    if "tokenizer_engine" not in {field.name for field in dataclasses.fields(PreprocessConfig)}:
        return [None]
    return ["tokenizers", "gigatoken"] if importlib.util.find_spec("gigatoken") else ["tokenizers"]


def read_texts(path: str, key: str) -> list[str]:
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line)[key] for line in file]


def raw_backend(vocab_file: str, merge_file: str) -> Any:
    """The library's own byte-level BPE."""
    from tokenizers.implementations import ByteLevelBPETokenizer

    backend = ByteLevelBPETokenizer(vocab_file, merge_file)
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([END_OF_TEXT])
    return backend


def raw_tokenizers(path: str, key: str, vocab_file: str, merge_file: str) -> Figures:
    """`tokenizers` alone: texts in memory to one array of ids, on all cores."""
    backend = raw_backend(vocab_file, merge_file)._tokenizer
    texts = read_texts(path, key)
    started = time.perf_counter()
    pieces = []
    for first in range(0, len(texts), 1000):
        encodings = backend.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
        pieces += [np.array(encoding.ids, np.int32) for encoding in encodings]
    ids = np.concatenate(pieces)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, **peak_memory(), "tokens": len(ids), "ids": sha256(ids)}


def raw_gigatoken(path: str, key: str, vocab_file: str, merge_file: str, reads_files: bool) -> Figures:
    """`gigatoken` alone, on all cores: from texts in memory, or from the file by its own JSON reader."""
    awkward, gigatoken = importlib.import_module("awkward"), importlib.import_module("gigatoken")
    tokenizer = gigatoken.Tokenizer.from_json(raw_backend(vocab_file, merge_file).to_str())
    texts = None if reads_files else read_texts(path, key)
    started = time.perf_counter()
    if texts is None:
        encoded = tokenizer.encode_files(gigatoken.JsonlFileSource([path], field=key))
    else:
        encoded = tokenizer.encode_batch(texts)
    ids = np.asarray(awkward.flatten(encoded))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, **peak_memory(), "tokens": len(ids), "ids": sha256(ids.astype(np.int32))}
