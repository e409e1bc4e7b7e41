"""Text to token ids and back: GPT-2's byte-level BPE, any local Hugging Face tokenizer, and ids as text.

Everything is read from local files through the ``tokenizers`` library; nothing is ever downloaded.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trimegatron.errors import ConfigError, DataError

TOKENIZER_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
END_OF_TEXT = "<|endoftext|>"

_BATCH, _PIECE = 1 << 20, 1 << 18  # characters
_WORD_END = re.compile(r"[!-~](?=[ \n])")


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

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """All ids in one int32 array, and the number of ids of each text, int32 [texts]."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text, special tokens included."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each id stands for, int64 [vocab_size], 0 for special tokens; None where ids do not stand for bytes."""
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
        # A tokenizer.json may carry a length limit or padding from its training days: either would change the data
        # silently. backend.no_truncation()
        backend.no_padding()
        self.backend, self.type, self.end_token, self.config = backend, type, end_token, config
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.eod: int | None = None if end_token is None else backend.token_to_id(end_token)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        # The library takes some 160 bytes per byte of text while it encodes, so it gets about a megabyte at a time.
        pieces, owners = self._pieces(texts)
        tokens: list[np.ndarray] = []
        lengths = np.zeros(len(texts), np.int32)
        start = 0
        for stop in _stops(pieces):
            ids, counts = _flatten(self.encode_batch(pieces[start:stop]))
            tokens.append(ids)
            np.add.at(lengths, owners[start:stop], counts)
            start = stop
        return np.concatenate(tokens) if tokens else np.empty(0, np.int32), lengths

    def _pieces(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """Long texts in pieces, and which text each piece is of.

        Exact for GPT-2's rule alone: there no word reaches over a blank that follows a visible character, and what comes
        after such a place does not depend on what comes before it. Other tokenizers get their texts whole.
        """
        pieces, owners = [], []
        for owner, text in enumerate(texts):
            start = 0
            while self.type == "GPT2BPETokenizer" and len(text) - start > _PIECE:
                place = _WORD_END.search(text, start + _PIECE)
                if place is None:
                    break
                pieces.append(text[start : place.end()])
                owners.append(owner)
                start = place.end()
            pieces.append(text[start:])
            owners.append(owner)
        return pieces, owners

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

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

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flatten(self.encode_batch(texts))

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
) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and its files describe.

    Args:
        tokenizer_type: ``GPT2BPETokenizer`` (``vocab_file``, ``merge_file``; ``<|endoftext|>`` is the end of a
            document, and the same letters inside a text give its id, as in Megatron since 2026),
            ``HuggingFaceTokenizer`` (``tokenizer_model``: a folder or a tokenizer.json) or ``NullTokenizer``
            (``vocab_size``).

    Raises:
        ConfigError: an unknown type, an option missing, a file missing or not what it should be.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        vocab, merges = (
            _need(tokenizer_type, "--vocab-file", vocab_file),
            _need(tokenizer_type, "--merge-file", merge_file),
        )
        backend = _byte_level_from_files(vocab, merges)
        return BPETokenizer(backend, tokenizer_type, END_OF_TEXT if backend.token_to_id(END_OF_TEXT) else None, {})
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


def byte_level_bpe(model: Any) -> Any:
    """A ``tokenizers.Tokenizer`` that cuts text as GPT-2 does: no normalisation, no space put in front."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers

    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_level_from_vocab(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """``byte_level_bpe`` of a whole vocabulary, with ``<|endoftext|>``, if it is in it, as a special token."""
    from tokenizers import AddedToken, models

    backend = byte_level_bpe(models.BPE(vocab, merges))
    if END_OF_TEXT in vocab:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend


def _byte_level_from_files(vocab_file: Path, merge_file: Path) -> Any:
    from tokenizers import models, pre_tokenizers

    # tokenizers raises plain Exceptions, with the reason in them but no file name.
    vocab, merges = _attempt(
        lambda: models.BPE.read_file(str(vocab_file), str(merge_file)), f"{vocab_file} and {merge_file}"
    )
    missing = [symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if symbol not in vocab]
    if missing:
        # The library would drop such bytes from the text without a word.
        raise ConfigError(
            f"{vocab_file}: {len(missing)} of the 256 byte symbols are missing; this is not a byte-level vocabulary"
        )
    return _attempt(lambda: byte_level_from_vocab(vocab, merges), f"{vocab_file} and {merge_file}")


def _hugging_face(path: Path, tokenizer_type: str) -> BPETokenizer:
    """From a folder with tokenizer.json, or with vocab.json and merges.txt, or from a tokenizer.json itself."""
    folder = path if path.is_dir() else path.parent
    model = path / "tokenizer.json" if path.is_dir() else path
    if model.is_file():
        from tokenizers import Tokenizer as Backend

        backend = _attempt(lambda: Backend.from_file(str(model)), str(model))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _byte_level_from_files(folder / "vocab.json", folder / "merges.txt")
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
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(folder / path.name)


def _need(tokenizer_type: str, flag: str, value: str | Path | None, folder: bool = False) -> Path:
    if value is None:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    path = Path(value)
    if not (path.is_file() or (folder and path.is_dir())):
        raise ConfigError(f"{flag} ({path}): no such file{' or folder' if folder else ''}")
    return path


def _attempt(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except Exception as error:
        raise ConfigError(f"{what}: cannot be read as a tokenizer ({error})") from error


def _stops(texts: Sequence[str]) -> Iterator[int]:
    """Where to cut a list so that each part holds about ``_BATCH`` characters or one longer text."""
    total = 0
    for k, text in enumerate(texts):
        if total and total + len(text) > _BATCH:
            yield k
            total = 0
        total += len(text)
    if texts:
        yield len(texts)


def _flatten(encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, encoded), np.int32, len(encoded))
    return np.fromiter(itertools.chain.from_iterable(encoded), np.int32, int(lengths.sum(dtype=np.int64))), lengths


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
