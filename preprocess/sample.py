"""Some texts of a run's own input, for comparing engines before they are trusted."""

from __future__ import annotations

from collections.abc import Sequence

from trimegatron.preprocess.inputs import Source
from trimegatron.preprocess.records import BadLine, parse_line

_SPOTS = 16  # places looked at
_SPOT_BYTES = 1 << 18  # read at each
_SPOT_CHARACTERS = 1 << 14  # of text kept of each


def sample_texts(sources: Sequence[Source], keys: Sequence[str]) -> list[str]:
    """Up to a quarter of a megabyte of texts from places spread over the input (packed files: from their beginning)."""
    chosen = [sources[k * len(sources) // min(len(sources), _SPOTS)] for k in range(min(len(sources), _SPOTS))]
    texts = []
    for source in chosen:
        spots = 1 if source.packed else min(_SPOTS // len(chosen), 1 + source.num_bytes // _SPOT_BYTES)
        for spot in range(spots):
            texts += _texts_at(source, source.num_bytes * spot // spots, keys)
    return texts


def _texts_at(source: Source, offset: int, keys: Sequence[str]) -> list[str]:
    with source.open() as (file, _):
        if offset:
            file.seek(offset)
        data = file.read(_SPOT_BYTES)
    lines = data.splitlines()
    whole = lines[bool(offset) : -1] if len(data) == _SPOT_BYTES else lines[bool(offset) :]
    texts: list[str] = []
    for raw in whole:
        try:
            texts += [str(text)[:_SPOT_CHARACTERS] for sentences in parse_line(raw, 0, keys) for text in sentences]
        except BadLine:
            continue  # reported when its turn comes
        if sum(map(len, texts)) >= _SPOT_CHARACTERS:
            break
    return texts or [data.decode(errors="ignore")[:_SPOT_CHARACTERS]]  # within a long line
