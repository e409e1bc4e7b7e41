"""What turns texts into ids: gigatoken where it gives the same ids as ``tokenizers``, else ``tokenizers``.

gigatoken only ever gets texts. Its own reader of JSON lines stops at the first line it dislikes and drops the rest.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trimegatron import byte_level
from trimegatron.errors import ConfigError
from trimegatron.long_text import LongText
from trimegatron.tokenizer import BPETokenizer, NullTokenizer, Tokenizer

ENGINES = ("auto", "gigatoken", "tokenizers")
_PIECE = 1 << 22  # characters given to gigatoken at a time
_CACHE_BYTES = 384 << 20  # that gigatoken's caches of words may take, of all processes together, but
_LEAST_CACHE = 32 << 20  # each of them may take this much
_CHECK_EVERY = 1 << 26  # characters between two looks where memory cannot be seen

_LOOK = 1 << 20  # characters looked at together
# fmt: off
_DISPUTED = (  # letters and digits that came with Unicode 17
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)
# fmt: on

PROBES = (
    "Hello world, it's 2026; I'll say \"we've\"  twice.\r\n\r\n\tdef f(x):\n        return x  # naïve \u00e9 e\u0301\n",
    "\u4f60\u597d\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\u00a0\u2003\u2028\u3000x\ufeff \x00\x01\x7f",
    "a <|endoftext|>b<|endoftext|> <|endof text|> 's 'S 'LL ''t don\u2019t",
    " " * 300 + "x" * 300 + "\n" * 30 + "0123456789" * 20,
)
"""Texts on which engines have been seen to differ: blanks, contractions, characters of several bytes, the end token."""


class Engine(Protocol):
    """Encodes texts. It can be pickled, and be used by several threads at once."""

    name: str
    batch_bytes: int
    """Of JSON to give it at a time."""
    splits: bool
    """Takes a LongText."""

    def encode(self, texts: Sequence[str | LongText], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
        """All ids in one array, no special token added, and the number of ids of each text, int32 [texts]."""
        ...


class TokenizersEngine:
    """``tokenizers`` (or NullTokenizer)."""

    batch_bytes = 1 << 20

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name = "tokenizers" if isinstance(tokenizer, BPETokenizer) else tokenizer.type
        self.splits = tokenizer.type == "GPT2BPETokenizer"

    def encode(self, texts: Sequence[str | LongText], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
        return self.tokenizer.encode_flat(texts, dtype)


class GigatokenEngine:
    """gigatoken. Its cache of words, which never shrinks, is thrown away when it has grown large.

    Args:
        definition: the text of a tokenizer.json.
        cut: what splits a long text into pieces whose tokens together are those of the text; None where nothing does.
        cache_bytes: that the cache may take.
    """

    name = "gigatoken"
    batch_bytes = 1 << 22  # a batch costs it 0.7 ms by itself

    def __init__(
        self,
        definition: str,
        cut: Callable[[str, int], Iterable[str]] | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self.definition, self.cut, self.cache_bytes = definition, cut, cache_bytes
        self.splits = cut is not None
        # One thread at a time encodes, so that a cache thrown away is really gone.
        self._lock = threading.Lock()
        self._backend: Any = None
        self._build()

    def _build(self) -> None:
        from gigatoken import Tokenizer as Backend

        self._backend = None  # first, so that there are never two caches
        self._backend = Backend.from_json(self.definition)
        self._memory, self._characters = resident_bytes(), 0

    def __getstate__(self) -> dict[str, Any]:
        return {"definition": self.definition, "cut": self.cut, "cache_bytes": self.cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def encode(self, texts: Sequence[str | LongText], dtype: Any = np.int32) -> tuple[np.ndarray, np.ndarray]:
        short = [text for text in texts if isinstance(text, str) and (self.cut is None or len(text) <= _PIECE)]
        if len(short) == len(texts) and not has_disputed("".join(text for text in short if not text.isascii())):
            with self._lock:
                self._bound_cache(sum(map(len, short)))
                encoded = self._backend.encode_batch(short, parallel=False)  # the processes are many already
            batch, lengths = _arrays(encoded)
            return batch.astype(dtype), lengths
        ids, lengths = bytearray(), np.zeros(len(texts), np.int32)  # bytes, which grow without a second copy
        for k, text in enumerate(texts):
            for piece in self._pieces(text):
                part = self._encode_one(piece)
                ids += part.astype(dtype).data
                lengths[k] += len(part)
        return np.frombuffer(ids, dtype), lengths

    def _pieces(self, text: str | LongText) -> Iterable[str]:
        if isinstance(text, LongText):
            return text
        return (text,) if self.cut is None else self.cut(text, _PIECE)

    def _encode_one(self, text: str) -> np.ndarray:
        if not text.isascii() and has_disputed(text):
            return np.array(self._reference.encode(text, add_special_tokens=False).ids, np.uint32)
        with self._lock:
            self._bound_cache(len(text))
            return self._backend.encode(text)

    @functools.cached_property
    def _reference(self) -> Any:
        from tokenizers import Tokenizer as Backend

        return Backend.from_str(self.definition)

    def _bound_cache(self, characters: int) -> None:
        """Start with an empty cache when it has grown large (65 ms for GPT-2's vocabulary)."""
        self._characters += characters
        memory = resident_bytes()
        if memory - self._memory > self.cache_bytes or (not memory and self._characters > _CHECK_EVERY):
            self._build()


def has_disputed(text: str) -> bool:
    """The text has a character that gigatoken takes for a letter or digit and tokenizers does not know yet.

    gigatoken 0.10 has the tables of Unicode 17, tokenizers 0.23 those of 16; words, and so ids, differ at these and
    (tried one by one) at no other character.
    """
    return any(
        bool(_disputed()[codes[codes >= _DISPUTED[0][0]]].any())
        for start in range(0, len(text), _LOOK)
        for codes in (np.frombuffer(text[start : start + _LOOK].encode("utf-32-le"), "<u4"),)
    )


@functools.cache
def _disputed() -> np.ndarray:
    table = np.zeros(0x110000, bool)
    for first, last in _DISPUTED:
        table[first : last + 1] = True
    return table


def _arrays(encoded: Any) -> tuple[np.ndarray, np.ndarray]:
    """From what gigatoken returns: an awkward array, or a list of arrays where awkward cannot be imported."""
    if isinstance(encoded, list):
        lengths = np.fromiter(map(len, encoded), np.int32, len(encoded))
        return np.concatenate([np.empty(0, np.uint32), *encoded]), lengths
    layout = encoded.layout.to_ListOffsetArray64(True)
    offsets = np.asarray(layout.offsets)
    return np.asarray(layout.content.data)[: offsets[-1]], np.diff(offsets).astype(np.int32)


def choose_engine(
    wanted: str, tokenizer: Tokenizer, sample: Callable[[], list[str]], processes: int
) -> tuple[Engine, str]:
    """The engine for a run, and a line that says which it is and why.

    Args:
        wanted: of ``--tokenizer-engine``.
        tokenizer: says what is right.
        sample: gives texts of this run; called only if gigatoken is there.
        processes: that will encode, each with a cache.

    Raises:
        ConfigError: gigatoken is ``wanted`` and cannot be used.
    """
    slow = TokenizersEngine(tokenizer)
    if isinstance(tokenizer, NullTokenizer) or not isinstance(tokenizer, BPETokenizer):
        return slow, f"Tokenizer engine: {slow.name}."
    if wanted == "tokenizers":
        return slow, "Tokenizer engine: tokenizers, as asked for."
    engine, reason = _gigatoken(tokenizer, sample, processes)
    if engine is not None:
        return engine, f"Tokenizer engine: gigatoken ({reason})."
    if wanted == "gigatoken":
        raise ConfigError(f"--tokenizer-engine (gigatoken) cannot be used: {reason}. Use auto or tokenizers.")
    return slow, f"Tokenizer engine: tokenizers ({reason})."


def _gigatoken(tokenizer: BPETokenizer, sample: Callable[[], list[str]], processes: int) -> tuple[Engine | None, str]:
    if importlib.util.find_spec("gigatoken") is None:
        return None, (
            "gigatoken is not installed; it encodes ten to thirty times as fast: pip install 'trimegatron[fast]'"
        )
    cut = byte_level.split_long if tokenizer.type == "GPT2BPETokenizer" else None
    try:
        engine = GigatokenEngine(tokenizer.definition(), cut, max(_LEAST_CACHE, _CACHE_BYTES // processes))
    except Exception as error:  # whatever it does not support
        return None, f"gigatoken cannot load this tokenizer: {error}"
    texts = [*PROBES, *sample()]
    expected, expected_lengths = tokenizer.encode_flat(texts)
    try:
        ids, lengths = engine.encode(texts)
    except Exception as error:
        return None, f"gigatoken fails on a sample of the documents: {error}"
    if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
        return engine, f"the same {len(ids):,} ids as tokenizers on {len(texts) - len(PROBES):,} documents of this run"
    return None, f"gigatoken gives other ids on a sample of {len(texts)} texts"


def resident_bytes() -> int:
    """Memory of this process now, 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
