"""One preprocessing run: read, encode, write, report."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import trimegatron
from trimegatron.data.index_format import best_dtype
from trimegatron.data.indexed_writer import publish
from trimegatron.errors import DataError
from trimegatron.preprocess.config import PreprocessConfig
from trimegatron.preprocess.encode import Encoder, Result
from trimegatron.preprocess.engine import choose_engine
from trimegatron.preprocess.output import Counts, Output
from trimegatron.preprocess.pool import encode_in_order
from trimegatron.preprocess.progress import Progress
from trimegatron.preprocess.reader import Chunk, Place, read_chunks
from trimegatron.preprocess.rejects import REJECTS, Rejects
from trimegatron.preprocess.sample import sample_texts
from trimegatron.preprocess.sentences import SentenceSplitter
from trimegatron.preprocess.workspace import Workspace
from trimegatron.tokenizer import BPETokenizer, Tokenizer


@dataclass(frozen=True)
class Summary:
    """The outcome of a run."""

    outputs: dict[str, Counts]  # by JSON key
    lines: list[str]  # a sentence about each
    rejects: int  # lines left out
    rejects_path: Path
    input_bytes: int  # JSON read in this run
    seconds: float
    engine: str

    def describe(self) -> str:
        """A line per key, one about lines left out, and one about the time."""
        lines = list(self.lines)
        if self.rejects:
            lines.append(f"{self.rejects:,} lines could not be used and were left out; {self.rejects_path} has them.")
        rate = self.input_bytes / 1e6 / max(self.seconds, 1e-9)
        lines.append(f"{self.input_bytes / 1e6:,.1f} MB in {self.seconds:,.1f} s, {rate:,.2f} MB/s ({self.engine})")
        return "\n".join(lines)


def run(config: PreprocessConfig) -> Summary:
    """Tokenize ``config.input`` into ``{output_prefix}_{key}_document.bin`` and ``.idx``, all of them or none.

    Raises:
        ConfigError: before anything is written.
        DataError: file and line of the first line that cannot be used, a dead worker, or a disk that refuses; no pair
            appears.
    """
    tokenizer = config.tokenizer()
    splitter = None
    if config.split_sentences:
        splitter = SentenceSplitter(config.lang, config.keep_newlines, config.megatron_compat)
    sources = config.sources()
    dtype = best_dtype(tokenizer.vocab_size) if config.dataset_impl == "mmap" else np.dtype("<i4")
    engine, reason = choose_engine(
        config.tokenizer_engine, tokenizer, lambda: sample_texts(sources, config.json_keys), config.workers
    )
    say(reason)
    eod = tokenizer.eod if config.append_eod else None
    encoder = Encoder(
        config.json_keys, engine, tokenizer.vocab_size, dtype, eod, splitter, skip=config.on_bad_line == "skip"
    )
    try:
        work = Workspace(config.output_prefix, _identity(config, tokenizer), config.resume)
        in_place = False
        try:
            report = work.state.get("report") if work.state else None
            if report is None:
                job = _Job(config, work, dtype, tokenizer.vocab_size)
                report = job.write(encoder, _metadata(config, tokenizer, dtype))
            _publish(config, work)
            in_place = True
        finally:
            keep = work.worth_keeping and not in_place
            work.close(remove=not keep)
            if keep:
                say(f"What was done is kept in {work.path}; --resume continues it.")
    except OSError as error:
        raise DataError(f"{error.filename or config.output_prefix}: {error.strerror or error}") from error
    counts = {key: Counts(**found) for key, found in report.pop("counts").items()}
    return Summary(outputs=counts, rejects_path=config.rejects_path, engine=engine.name, **report)


class _Job:
    """Writes everything into the working folder, from the beginning or from where an earlier run was stopped."""

    def __init__(self, config: PreprocessConfig, work: Workspace, dtype: np.dtype, vocab_size: int) -> None:
        self.config, self.work = config, work
        state = work.state or {}
        if config.resume:
            say(f"Continuing at {100 * state['done']:.0f} %." if state else "Nothing to continue; starting anew.")
        self.place = Place(*state.get("place", ()))
        self.progress = Progress(config.log_interval, state.get("done", 0.0))
        self.rejects = Rejects(work.path, state.get("rejects"))
        self.outputs = {
            key: Output(
                config.prefix(key),
                dtype,
                config.dataset_impl,
                vocab_size,
                drop_empty=config.megatron_compat < 2026,
                folder=work.path,
                shuffle_seed=config.shuffle_seed,
                text_bytes=sum(source.text_bytes for source in config.sources()),
                state=state["outputs"][key] if state else None,
            )
            for key in config.json_keys
        }

    def write(self, encoder: Encoder, metadata: dict[str, Any]) -> dict[str, Any]:
        """Read, encode, write; returns the figures, which are saved as well."""
        chunks = read_chunks(self.config.sources(), self.place, self.config.turns, encoder.engine.batch_bytes)
        for chunk, result in encode_in_order(encoder, chunks, self.config.workers):
            self._take(chunk, result)
            if self.work.due:
                self._save()
        self.progress.say()
        self._save()
        for key, output in self.outputs.items():
            output.prepare({**metadata, "json_key": key})
        self.rejects.close()
        report = {
            "counts": {key: asdict(output.counts) for key, output in self.outputs.items()},
            "lines": [output.describe() for output in self.outputs.values()],
            "rejects": self.rejects.count,
            "input_bytes": self.progress.bytes,
            "seconds": self.progress.seconds,
        }
        self.work.save({"done": 1.0, "report": report})
        return report

    def _take(self, chunk: Chunk, result: Result) -> None:
        for output, encoded in zip(self.outputs.values(), result.keys, strict=True):
            output.add(encoded)
        self.rejects.add(chunk, result.rejects)
        self.place = chunk.end
        tokens = sum(len(encoded.tokens) for encoded in result.keys)
        self.progress.count(len(result.keys[0].sequences), chunk.num_bytes, tokens, chunk.done)

    def _save(self) -> None:
        state = {"outputs": {key: output.state() for key, output in self.outputs.items()}}
        self.work.save({**state, "rejects": self.rejects.state(), "place": self.place, "done": self.progress.done})


def _publish(config: PreprocessConfig, work: Workspace) -> None:
    for key in config.json_keys:
        publish(work.path, config.prefix(key))
    rejects = work.path / REJECTS
    if rejects.exists():
        rejects.replace(config.rejects_path)
    else:
        config.rejects_path.unlink(missing_ok=True)  # of an earlier run: this one has none


def _identity(config: PreprocessConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the bytes of the output depend on."""
    files = [[str(s.path.resolve()), s.num_bytes, s.path.stat().st_mtime_ns] for s in config.sources()]
    names = (
        "json_keys",
        "dataset_impl",
        "append_eod",
        "megatron_compat",
        "split_sentences",
        "keep_newlines",
        "lang",
        "shuffle_seed",
    )
    options = {name.replace("_", "-"): getattr(config, name) for name in names}
    return {**options, "partitions": config.turns, "input": files, "tokenizer": _digest(tokenizer)}


def _metadata(config: PreprocessConfig, tokenizer: Tokenizer, dtype: np.dtype) -> dict[str, Any]:
    """What the sidecar file says of how tokens were made."""
    return {
        "trimegatron": trimegatron.__version__,
        "megatron_compat": config.megatron_compat,
        "dataset_impl": config.dataset_impl,
        "dtype": dtype.name,
        "tokenizer_type": tokenizer.type,
        "tokenizer_sha256": _digest(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": config.append_eod,
        "level": "sentence" if config.split_sentences else "document",
        "partitions": config.turns,
        "shuffle_seed": config.shuffle_seed,
        "input": [{"name": source.path.name, "bytes": source.num_bytes} for source in config.sources()],
    }


def _digest(tokenizer: Tokenizer) -> str:
    known = f"{tokenizer.type} {tokenizer.vocab_size}"
    if isinstance(tokenizer, BPETokenizer):
        known = tokenizer.definition()
    return hashlib.sha256(known.encode()).hexdigest()


def say(line: str) -> None:
    """A line on stderr; the summary alone goes to stdout."""
    print(line, file=sys.stderr, flush=True)
