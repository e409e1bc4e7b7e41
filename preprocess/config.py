"""The options of ``trimegatron preprocess``, with the names of Megatron's ``tools/preprocess_data.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimegatron.config.options import REQUIRED, Options, fail, option
from trimegatron.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

_LATER = "is not supported yet"


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Options):
    """Preprocessing: loose JSON to .bin and .idx

    Writes {output-prefix}_{key}_document.bin and .idx for each key."""

    input: list[str] = option(REQUIRED, "JSON file with one object a line, UTF-8")
    json_keys: list[str] = option(["text"], "keys whose values are tokenized, each into a pair of files of its own")
    output_prefix: str = option(REQUIRED, "path and beginning of the names of the output files")
    dataset_impl: str = option("mmap", "format of the output", choices=("mmap", "lazy", "cached"))
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
    append_eod: bool = option(False, "end every document that has tokens with the end-of-document token")
    workers: int = option(1, "processes that tokenize; the output is the same for any number", minimum=1)
    chunk_size: int = option(32, "most lines handed to a process at a time", unit="lines", minimum=1)
    log_interval: int = option(100, "documents between progress lines", unit="documents", minimum=1)

    split_sentences: bool = option(False, _LATER, hidden=True)
    keep_newlines: bool = option(False, _LATER, hidden=True)
    lang: str = option("english", _LATER, hidden=True)
    partitions: int = option(1, _LATER, hidden=True)
    keep_sequential_samples: bool = option(False, _LATER, hidden=True)
    max_documents: int | None = option(None, _LATER, hidden=True)
    find_optimal_num_workers: bool = option(False, _LATER, hidden=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_sentences or self.keep_newlines:
            way_out = "Without it a document is one sequence, which is what GPT training wants."
            name = "split_sentences" if self.split_sentences else "keep_newlines"
            fail(name, "on", _LATER, way_out=way_out)
        if self.dataset_impl != "mmap":
            fail("dataset_impl", self.dataset_impl, _LATER, way_out="Use mmap, the format GPT training reads.")
        if self.partitions != 1:
            fail("partitions", self.partitions, _LATER, way_out="Leave it out; --workers uses all cores as it is.")
        if self.max_documents is not None:
            fail("max_documents", self.max_documents, _LATER, way_out="Cut the input: head -n N.")
        if self.find_optimal_num_workers:
            fail("find_optimal_num_workers", "on", _LATER, way_out="Give --workers the number of cores.")
        if len(set(self.json_keys)) < len(self.json_keys):
            fail("json_keys", " ".join(self.json_keys), "must name each key once")
        self._check_input()
        folder = Path(self.output_prefix).parent
        if not folder.is_dir():
            fail("output_prefix", self.output_prefix, f"must be in an existing folder; {folder} is none")

    def _check_input(self) -> None:
        if len(self.input) != 1:
            one = "Join the files first: cat a.jsonl b.jsonl > all.jsonl."
            fail("input", " ".join(self.input), f"{_LATER} with several files", way_out=one)
        path = self.source
        if path.suffix in (".gz", ".bz2", ".zst", ".xz"):
            fail("input", path, f"{_LATER} in compressed form", way_out="Unpack it first.")
        if path.is_dir():
            fail("input", path, f"{_LATER} as a folder", way_out="Name one file.")
        if not path.is_file():
            fail("input", path, "must be a file; there is none of that name")

    @property
    def source(self) -> Path:
        """The one input file."""
        return Path(self.input[0])

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError, also for one without the end token that ``append_eod`` needs."""
        tokenizer = build_tokenizer(
            self.tokenizer_type,
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tokenizer_model=self.tokenizer_model,
            vocab_size=self.vocab_size,
        )
        if self.append_eod and tokenizer.eod is None:
            fail(
                "append_eod",
                "on",
                f"needs a tokenizer with an end-of-document token; this {self.tokenizer_type} has none",
                way_out="Name one as eos_token in tokenizer_config.json, add <|endoftext|>, or leave --append-eod out.",
            )
        return tokenizer
