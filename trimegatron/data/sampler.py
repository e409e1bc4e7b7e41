"""Which samples each data-parallel rank reads: ``--dataloader-type single``.

The global order is the dataset's own: sample number k is the k-th one consumed over the whole run, whatever the
data-parallel size and the micro-batch size. They only decide who reads it, so a run resumed with another layout reads
what it would have read.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimegatron.errors import DataError


class MicroBatchSampler:
    """Lists of ``micro_batch_size`` dataset indices for one data-parallel rank.

    Each group of micro_batch_size · data_parallel_size consecutive samples is dealt in runs of micro_batch_size by
    rank; a last group that is not whole is dropped, so that every rank gets equally many.

    Args:
        total_samples: samples in the dataset.
        consumed_samples: samples that the whole run, all ranks together, has read before.
        micro_batch_size: samples in one micro-batch.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.

    Raises:
        DataError: nothing is left to read.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        assert micro_batch_size > 0 and 0 <= data_parallel_rank < data_parallel_size and consumed_samples >= 0
        self.group = micro_batch_size * data_parallel_size
        if total_samples - consumed_samples < self.group:
            raise DataError(
                f"the dataset holds {total_samples} samples and {consumed_samples} are consumed; one micro-batch on "
                f"every rank takes {self.group} more (micro-batch {micro_batch_size} × data-parallel "
                f"{data_parallel_size}): ask for fewer iterations or give more data"
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size = micro_batch_size
        self.offset = data_parallel_rank * micro_batch_size

    def __len__(self) -> int:
        """Micro-batches left for this rank."""
        return (self.total_samples - self.consumed_samples) // self.group

    def __iter__(self) -> Iterator[list[int]]:
        for k in range(len(self)):
            first = self.consumed_samples + k * self.group + self.offset
            yield list(range(first, first + self.micro_batch_size))
