"""Cutting texts into sentences with nltk's Punkt, for ``--split-sentences``. Nothing is ever downloaded."""

from __future__ import annotations

from typing import Any

from trimegatron.errors import ConfigError

_MOST = 1_000_000  # characters that Megatron-LM of 2026 gives to nltk at a time


class SentenceSplitter:
    """Cuts a text into sentences.

    Args:
        lang: a language that nltk has data for.
        keep_newlines: leave blanks and line ends between sentences with the sentence before; they are dropped
            otherwise.
        megatron_compat: 2026 first cuts texts into pieces of a million characters, 2022 does not.

    Raises:
        ConfigError: nltk or its data for the language is missing.
    """

    def __init__(self, lang: str, keep_newlines: bool, megatron_compat: int) -> None:
        self.lang, self.keep_newlines, self.megatron_compat = lang, keep_newlines, megatron_compat
        self._punkt = load_punkt(lang)

    def __reduce__(self) -> Any:
        return SentenceSplitter, (self.lang, self.keep_newlines, self.megatron_compat)

    def __call__(self, text: str) -> list[str]:
        if self.megatron_compat < 2026 or len(text) <= _MOST:
            return self._split(text)
        return [sentence for k in range(0, len(text), _MOST) for sentence in self._split(text[k : k + _MOST])]

    def _split(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        if self.keep_newlines and spans:
            # A sentence reaches up to the next one. Blanks at the end of the text belong to none.
            ends = [start for start, _ in spans[1:]] + [len(text.rstrip())]
            spans = [(start, max(start, end)) for (start, _), end in zip(spans, ends, strict=True)]
        return [text[start:end] for start, end in spans]


def load_punkt(lang: str) -> Any:
    """nltk's sentence tokenizer with the data of a language. Raises ConfigError."""
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ImportError as error:
        raise ConfigError(
            f"--split-sentences needs the nltk package ({error}): pip install 'trimegatron[nltk]'."
        ) from None
    try:
        return PunktTokenizer(lang)
    except LookupError:
        raise ConfigError(
            f"--split-sentences: nltk's sentence data for --lang ({lang}) is not on this machine. Fetch it once with: "
            "python -m nltk.downloader punkt_tab (NLTK_DATA names another folder to look in)."
        ) from None
