"""The options of ``trimegatron preprocess``, with the names of Megatron's ``tools/preprocess_data.py``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.data.indexed_writer import DATASET_IMPLS
from trimegatron.preprocess.engine import ENGINES
from trimegatron.preprocess.inputs import Source, find_sources
from trimegatron.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

_BYTES_PER_WORKER = 4 << 20  # less input than this is not worth another process


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Options):
    """Tokenizer"""

    tokenizer_type: str = option(
        REQUIRED,
        "GPT2BPETokenizer: --vocab-file and --merge-file; HuggingFaceTokenizer: --tokenizer-model; "
        "NullTokenizer: --vocab-size",
        choices=TOKENIZER_TYPES,
    )
    vocab_file: str | None = option(None, "vocab.json of GPT2BPETokenizer", flags=("--vocab",))
    merge_file: str | None = option(None, "merges.txt of GPT2BPETokenizer", flags=("--merge",))
    tokenizer_model: str | None = option(None, "folder or tokenizer.json of HuggingFaceTokenizer")
    vocab_size: int | None = option(None, "number of ids of NullTokenizer", minimum=1)

    def build(self, megatron_compat: int = 2026) -> Tokenizer:
        """The tokenizer. Raises ConfigError."""
        return build_tokenizer(
            self.tokenizer_type,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tokenizer_model=self.tokenizer_model,
            vocab_size=self.vocab_size,
            megatron_compat=megatron_compat,
        )


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(TokenizerConfig):
    """Preprocessing: loose JSON to .bin and .idx

    Writes {output-prefix}_{key}_document.bin and .idx for each key ({…}_sentence with --split-sentences), and beside
    them .meta.json, which says how they were made."""

    input: list[str] = option(
        REQUIRED, "files, globs or folders of JSON, one object a line, UTF-8; .gz, .bz2, .xz and .zst are unpacked"
    )
    json_keys: list[str] = option(["text"], "keys whose values are tokenized, each into a pair of files of its own")
    output_prefix: str = option(REQUIRED, "path and beginning of the names of the output files")
    dataset_impl: str = option("mmap", "format of the output", choices=DATASET_IMPLS)
    append_eod: bool = option(False, "end every document that has tokens with the end-of-document token")
    megatron_compat: int = option(
        2026,
        "ours. 2022: documents without tokens vanish, <|endoftext|> in a text is text; 2026: they stay as empty "
        "documents, it is the end-of-document id",
        choices=(2022, 2026),
    )
    split_sentences: bool = option(False, "cut documents into sentences, each a sequence (needs nltk and its data)")
    keep_newlines: bool = option(False, "with --split-sentences: keep line ends between sentences")
    lang: str = option("english", "with --split-sentences: language of the texts")
    partitions: int = option(1, "write the lines k, k + N, … for k = 0 … N - 1, as Megatron's partitions do", minimum=1)
    keep_sequential_samples: bool = option(False, "with --partitions: keep the order of the input")
    shuffle_seed: int | None = option(None, "ours. Write the documents in an order that follows from this number")

    workers: int = option(
        None,
        "cores to use; the output is the same for any number",
        derived="all, for enough input",
        minimum=1,
    )
    tokenizer_engine: str = option(
        "auto",
        "ours. auto: gigatoken where it is installed and gives the ids of tokenizers on a sample of the documents",
        choices=ENGINES,
    )
    on_bad_line: str = option(
        "fail",
        "ours. fail: stop at a line that cannot be used; skip: put it into {output-prefix}_rejects.jsonl",
        choices=("fail", "skip"),
    )
    resume: bool | None = option(None, "ours. Continue a run that was stopped; --no-resume throws it away")
    log_interval: int = option(100, "least documents between progress lines", unit="documents", minimum=1)
    chunk_size: int | None = option(None, "accepted; about a megabyte at a time is taken", unit="lines", minimum=1)
    max_documents: int | None = option(None, "is not supported yet", hidden=True)
    find_optimal_num_workers: bool = option(False, "is not supported yet", hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_documents is not None:
            fail("max_documents", self.max_documents, "is not supported", way_out="Cut the input: head -n N.")
        if self.find_optimal_num_workers:
            fail("find_optimal_num_workers", "on", "is not supported", way_out="Leave --workers out.")
        if self.keep_newlines and not self.split_sentences:
            fail("keep_newlines", "on", "is about --split-sentences", way_out="Add it, or leave this out.")
        if self.partitions > 1 and self.shuffle_seed is not None and not self.keep_sequential_samples:
            fail("partitions", self.partitions, "orders the documents, as --shuffle-seed does", way_out="Choose one.")
        if len(set(self.json_keys)) < len(self.json_keys):
            fail("json_keys", " ".join(self.json_keys), "must name each key once")
        self.sources()
        folder = Path(self.output_prefix).parent
        if not folder.is_dir():
            fail("output_prefix", self.output_prefix, f"must be in an existing folder; {folder} is none")
        if self.workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            busy = 1 + sum(source.text_bytes for source in self.sources()) // _BYTES_PER_WORKER
            self._derive(workers=min(cores, busy))

    def sources(self) -> list[Source]:
        """The input files, in order."""
        return find_sources(self.input)

    @property
    def turns(self) -> int:
        """How often the input is read through."""
        return 1 if self.keep_sequential_samples else self.partitions

    def prefix(self, key: str) -> Path:
        """Of the pair of a JSON key."""
        return Path(f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}")

    @property
    def rejects_path(self) -> Path:
        return Path(f"{self.output_prefix}_rejects.jsonl")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError, also for one without the end token that ``append_eod`` needs."""
        tokenizer = self.build(self.megatron_compat)
        if self.append_eod and tokenizer.eod is None:
            fail(
                "append_eod",
                "on",
                f"needs a tokenizer with an end-of-document token; this {self.tokenizer_type} has none",
                way_out="Name one as eos_token in tokenizer_config.json, add <|endoftext|>, or leave --append-eod out.",
            )
        return tokenizer
