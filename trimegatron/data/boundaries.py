"""Where documents meet inside a sample: ``--reset-position-ids``, ``--reset-attention-mask``, ``--eod-mask-loss``.

The rules are Megatron's. They look at the *inputs* only: a document ends with its end-of-document token (the eod), so
the next one begins at the position after it, and an eod that is the last input changes nothing within the sample. A
sample that starts in the middle of a document starts at position 0 all the same.

Legend: b samples, s sequence length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from trimegatron.errors import DataError


@dataclass(frozen=True)
class DocumentBoundaries:
    """What is asked for at the ends of documents.

    Raises:
        DataError: something is asked for and ``eod`` is None.
    """

    eod: int | None = None
    """The end-of-document token."""
    eod_mask_loss: bool = False
    """No loss where the input is the eod: it would be that of guessing how an unrelated document begins."""
    reset_position_ids: bool = False
    """Positions count from 0 again after an eod."""
    reset_attention_mask: bool = False
    """Nothing after an eod sees up to and including it."""

    def __post_init__(self) -> None:
        if self.asked and self.eod is None:
            raise DataError(f"{self.asked[0]} needs a tokenizer with an end-of-document token; this one has none")

    @property
    def asked(self) -> list[str]:
        """The options that are on."""
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]

    def missing_from(self, samples: Iterable[np.ndarray]) -> str | None:
        """A line where something is asked for and no eod is in these samples: the data may hold none."""
        if not self.asked:
            return None
        count = 0
        for sample in samples:
            if (sample == self.eod).any():
                return None
            count += 1
        return (
            f"the first {count} samples hold no end-of-document token ({self.eod}), where {', '.join(self.asked)} "
            "would act; `trimegatron preprocess --append-eod` writes one after every document"
        )

    def loss_mask(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [b, s] for the inputs int64 [b, s]: 1 where the loss counts."""
        if self.eod_mask_loss:
            return (tokens != self.eod).astype(np.float32)
        return np.ones(tokens.shape, np.float32)

    def document_starts(self, tokens: np.ndarray) -> np.ndarray:
        """int64 [b, s] for the inputs int64 [b, s]: where the document of each position begins in the sample."""
        starts = np.zeros(tokens.shape, np.int64)
        starts[:, 1:] = np.where(tokens[:, :-1] == self.eod, np.arange(1, tokens.shape[1]), 0)
        return np.maximum.accumulate(starts, axis=1, out=starts)
