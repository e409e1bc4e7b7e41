"""Where documents meet inside a sample: ``--reset-position-ids``, ``--reset-attention-mask``, ``--eod-mask-loss``.

The rules are Megatron's. They look at the *inputs* only: a document ends with its end-of-document token (the eod), so
the next one begins at the position after it, and an eod that is the last input changes nothing within the sample. A
sample that starts in the middle of a document starts at position 0 all the same.

Legend: b samples, s sequence length.
"""

from __future__ import annotations

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
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if getattr(self, name) and self.eod is None:
                raise DataError(
                    f"--{name.replace('_', '-')} needs a tokenizer with an end-of-document token; this one has none"
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
