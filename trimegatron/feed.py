"""What the trainer takes its micro-batches from: this rank's loader over a dataset, and what is checked on the way."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from trimegatron.activity import Activity
from trimegatron.config import Config
from trimegatron.data.boundaries import DocumentBoundaries
from trimegatron.data.cyclic import SampleDataset
from trimegatron.data.loader import Batch, build_loader
from trimegatron.errors import DataError
from trimegatron.mesh import Mesh
from trimegatron.tokenizer import Tokenizer

LOOKED_AT = 256
"""Samples searched for an end of a document before training; a few milliseconds."""


class Feed:
    """Micro-batches for one rank."""

    def __init__(self, config: Config, *, mesh: Mesh, tokenizer: Tokenizer, activity: Activity):
        self.config, self.mesh, self.activity = config, mesh, activity
        self.boundaries = DocumentBoundaries(
            tokenizer.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
        )
        token_bytes = tokenizer.token_bytes()
        self.token_bytes = None if token_bytes is None else torch.from_numpy(token_bytes).to(mesh.device)

    def loader(self, dataset: SampleDataset, consumed_samples: int) -> Generator[Batch]:
        """Micro-batches of this rank, from ``consumed_samples`` on."""
        config = self.config
        return build_loader(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=self.mesh.data.rank,
            data_parallel_size=self.mesh.data.size,
            num_workers=config.data.num_workers,
            boundaries=self.boundaries,
            pin_memory=self.mesh.device.type == "cuda",
        )

    def missing_boundaries(self, dataset: SampleDataset) -> str | None:
        """On the first rank, what to say where the data does not look as if the options about ends of documents could
        do anything."""
        if not self.mesh.is_first_rank:
            return None
        return self.boundaries.missing_from(dataset[i] for i in range(min(len(dataset), LOOKED_AT)))

    def take(self, batches: Iterator[Batch], num_micro_batches: int) -> Iterator[Batch]:
        """This rank's micro-batches of one global batch, on the device.

        Raises:
            DataError: an id is none of the vocabulary: looked up, it would be another rank's row or nobody's.
        """
        vocab_size = self.config.model.vocab_size
        for _ in range(num_micro_batches):
            self.activity.note("reading data")
            batch = next(batches)
            largest = int(max(batch.tokens.max(), batch.labels.max()))
            if vocab_size is not None and largest >= vocab_size:
                raise DataError(
                    f"{' '.join(self.config.data.data_path)} holds the token id {largest}, but the vocabulary has "
                    f"{vocab_size} words. Was it preprocessed with another tokenizer?"
                )
            self.activity.note("forward and backward passes" if torch.is_grad_enabled() else "evaluation")
            yield batch.to(self.mesh.device)

    def count_bytes(self, batches: list[Batch]) -> torch.Tensor:
        """Bytes of text in the labels that count; 0 where the tokenizer cannot say."""
        total = torch.zeros((), device=self.mesh.device)
        if self.token_bytes is not None:
            for batch in batches:
                total += (self.token_bytes[batch.labels] * batch.loss_mask).sum()
        return total
