"""Text to token ids and back: GPT-2's byte-level BPE, any local Hugging Face tokenizer, and ids as text.

Everything is read from local files through the ``tokenizers`` library; nothing is ever downloaded.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trimegatron import byte_level
from trimegatron.byte_level import END_OF_TEXT, attempt
from trimegatron.errors import ConfigError, DataError
from trimegatron.files import sync_file
from trimegatron.long_text import LongText

TOKENIZER_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
_BATCH, _PIECE = 1 << 20, 1 << 18  # characters


class Tokenizer(Protocol):
    """What preprocessing, training and conversion need of a tokenizer."""

    type: str
    """The name ``build_tokenizer`` takes."""
    vocab_size: int
    """True size, not padded: one more than the largest id."""
    eod: int | None
    """The end-of-document id, None where there is none."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text, no special token added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ...

    def encode_flat(self, texts: Sequence[str | LongText], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
        """All ids in one array, and the number of ids of each text, int32 [texts]. LongText is for GPT2BPETokenizer."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text, special tokens included."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text behind each id, int64 [vocab_size], 0 for special tokens; None where ids are not bytes."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write the files from which ``load_tokenizer``, and transformers' AutoTokenizer, read it back."""
        ...


class BPETokenizer:
    """A tokenizer of the ``tokenizers`` library.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        type: ``GPT2BPETokenizer`` or ``HuggingFaceTokenizer``.
        end_token: the end-of-document token, None where there is none.
        config: what a ``tokenizer_config.json`` said; ``save`` passes it on.
    """

    def __init__(self, backend: Any, type: str, end_token: str | None, config: dict[str, Any]) -> None:
        # A tokenizer.json may carry a length limit or padding from its training days: they would change data silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.type, self.end_token, self.config = backend, type, end_token, config
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.eod: int | None = None if end_token is None else backend.token_to_id(end_token)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plain": self.backend.encode_special_tokens}  # the library forgets it

    def __setstate__(self, state: dict[str, Any]) -> None:
        plain = state.pop("plain")
        vars(self).update(state)
        self.backend.encode_special_tokens = plain

    def definition(self) -> str:
        """The text of a tokenizer.json that encodes as this one does."""
        if not self.backend.encode_special_tokens:
            return self.backend.to_str()
        content = json.loads(self.backend.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
        return json.dumps(content)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str | LongText], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
        # The library takes some 160 bytes per byte of text while it encodes, so it gets about a megabyte at a time.
        tokens, totals = [np.empty(0, dtype)], np.zeros(len(texts), np.int32)
        for pieces, owners in _batches(texts, split=self.type == "GPT2BPETokenizer"):
            ids, lengths = _flatten(self.encode_batch(pieces), dtype)
            tokens.append(ids)
            np.add.at(totals, owners, lengths)
        return np.concatenate(tokens), totals

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray | None:
        if type(self.backend.decoder).__name__ != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        special = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        for token, i in self.backend.get_vocab().items():
            lengths[i] = 0 if token in special else len(token)  # a character of the byte-level alphabet is a byte
        return lengths

    def save(self, folder: str | Path) -> None:
        default = "GPT2Tokenizer" if self.type == "GPT2BPETokenizer" else "PreTrainedTokenizerFast"
        config = {"tokenizer_class": default, "clean_up_tokenization_spaces": False, **self.config}
        if self.type == "GPT2BPETokenizer":
            config |= {"add_prefix_space": False, "bos_token": self.end_token, "unk_token": self.end_token}
        with _filling(Path(folder)) as temporary:
            self.backend.save(str(temporary / "tokenizer.json"))
            if type(self.backend.model).__name__ == "BPE":
                self.backend.model.save(str(temporary))
            _write_json(temporary / "tokenizer_config.json", config | {"eos_token": self.end_token})


class NullTokenizer:
    """Ids written as text, "17 4 256": for tests and benchmarks. As in Megatron the ids are 0 … vocab_size − 1 and the
    end-of-document id is one *more*, so that the true vocabulary is ``vocab_size`` + 1.
    """

    type = "NullTokenizer"

    def __init__(self, vocab_size: int) -> None:
        self.eod: int | None = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise DataError(f"NullTokenizer reads token ids with spaces between them; got {text[:60]!r}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(f"token ids {min(ids)}..{max(ids)} are outside the vocabulary 0..{self.vocab_size - 1}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str | LongText], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
        return _flatten([self.encode(text) for text in texts if isinstance(text, str)], dtype)

    def token_bytes(self) -> np.ndarray | None:
        return None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)

    def save(self, folder: str | Path) -> None:
        config = {"tokenizer_class": self.type, "vocab_size": self.vocab_size - 1}
        with _filling(Path(folder)) as temporary:
            _write_json(temporary / "tokenizer_config.json", config)


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    vocab_size: int | None = None,
    megatron_compat: int = 2026,
) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its files describe.

    Args:
        tokenizer_type: ``GPT2BPETokenizer`` (``vocab_file``, ``merge_file``; ``<|endoftext|>`` is the end of a
            document), ``HuggingFaceTokenizer`` (``tokenizer_model``: a folder or a tokenizer.json) or
            ``NullTokenizer`` (``vocab_size``).
        megatron_compat: of GPT2BPETokenizer, whose rule for the letters ``<|endoftext|>`` inside a text: the id of
            the end of a document (2026), or text like any other (2022).

    Raises:
        ConfigError: an unknown type, an option missing, a file missing or not what it should be.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        vocab, merges = (
            _need(tokenizer_type, "--vocab-file", vocab_file),
            _need(tokenizer_type, "--merge-file", merge_file),
        )
        backend = byte_level.from_files(vocab, merges)
        backend.encode_special_tokens = megatron_compat < 2026
        end = None if backend.token_to_id(END_OF_TEXT) is None else END_OF_TEXT
        return BPETokenizer(backend, tokenizer_type, end, {})
    if tokenizer_type == "HuggingFaceTokenizer":
        path = _need(tokenizer_type, "--tokenizer-model", tokenizer_model, folder=True)
        return _hugging_face(path, tokenizer_type)
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"--vocab-size ({vocab_size}) must be at least 1 for --tokenizer-type NullTokenizer")
        return NullTokenizer(vocab_size)
    raise ConfigError(f"--tokenizer-type ({tokenizer_type}) must be one of {', '.join(TOKENIZER_TYPES)}")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that ``save`` wrote into ``folder``. Raises ConfigError."""
    folder = Path(folder)
    config_file = folder / "tokenizer_config.json"
    if not config_file.is_file():
        raise ConfigError(
            f"{config_file}: no such file; a folder written with a checkpoint or by `tokenizer train` has it"
        )
    config = _read_json(config_file)
    if config.get("tokenizer_class") == "NullTokenizer":
        return NullTokenizer(config["vocab_size"])
    gpt2 = str(config.get("tokenizer_class")).startswith("GPT2")
    return _hugging_face(folder, "GPT2BPETokenizer" if gpt2 else "HuggingFaceTokenizer")


def _hugging_face(path: Path, tokenizer_type: str) -> BPETokenizer:
    """From a folder with tokenizer.json, or with vocab.json and merges.txt, or from a tokenizer.json itself."""
    folder = path if path.is_dir() else path.parent
    model = path / "tokenizer.json" if path.is_dir() else path
    if model.is_file():
        from tokenizers import Tokenizer as Backend

        backend = attempt(lambda: Backend.from_file(str(model)), str(model))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = byte_level.from_files(folder / "vocab.json", folder / "merges.txt")
    else:
        raise ConfigError(f"--tokenizer-model ({path}) must hold tokenizer.json, or vocab.json and merges.txt")
    if backend.get_vocab_size() == 0:
        raise ConfigError(f"{model}: the vocabulary is empty")
    config = _read_json(folder / "tokenizer_config.json")
    end = config.get("eos_token") or _read_json(folder / "special_tokens_map.json").get("eos_token") or END_OF_TEXT
    end = end["content"] if isinstance(end, dict) else end
    if backend.token_to_id(end) is None:
        end = None
    return BPETokenizer(backend, tokenizer_type, end, config)


@contextmanager
def _filling(folder: Path) -> Iterator[Path]:
    """A temporary folder whose files move into ``folder``, which is made, when all of them are written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer.") as temporary:
        yield Path(temporary)
        for path in Path(temporary).iterdir():
            sync_file(path)
            path.replace(folder / path.name)


def _need(tokenizer_type: str, flag: str, value: str | Path | None, folder: bool = False) -> Path:
    if value is None:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    path = Path(value)
    if not (path.is_file() or (folder and path.is_dir())):
        raise ConfigError(f"{flag} ({path}): no such file{' or folder' if folder else ''}")
    return path


def _batches(texts: Sequence[str | LongText], split: bool) -> Iterator[tuple[list[str], list[int]]]:
    """Texts, or with ``split`` pieces of long ones, about ``_BATCH`` characters at a time, and the text of each."""
    batch: list[str] = []
    owners: list[int] = []
    total = 0
    for k, text in enumerate(texts):
        pieces: Iterable[str] = text if isinstance(text, LongText) else (text,)
        if split:
            pieces = (part for piece in pieces for part in byte_level.split_long(piece, _PIECE))
        for piece in pieces:
            if batch and total + len(piece) > _BATCH:
                yield batch, owners
                batch, owners, total = [], [], 0
            batch.append(piece)
            owners.append(k)
            total += len(piece)
    if batch:
        yield batch, owners


def _flatten(encoded: list[list[int]], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, encoded), np.int32, len(encoded))
    return np.fromiter(itertools.chain.from_iterable(encoded), dtype, int(lengths.sum(dtype=np.int64))), lengths


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a JSON object ({error})") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
