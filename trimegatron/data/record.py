"""What a checkpoint says about the data: which samples of the run came from where, one segment for each setting.

A run goes on in the same segment as long as nothing that decides the order of its samples changes. With a segment's
description the datasets can be built again, and with them the documents of every step be found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimegatron.data.cyclic import SampleDataset
from trimegatron.errors import CheckpointError

_CHUNK = 1 << 20
_SHOWN = 8
"""Documents of one source that a message names."""


@dataclass
class DataRecord:
    """The segment that is running, and those before it.

    Args:
        description: everything that decides the order of the training samples, as JSON gives it back, and the
            ``paths``, which do not.
        train: the training set.
    """

    description: dict[str, Any]
    train: SampleDataset
    first_sample: int = 0
    """Number of the segment's first sample in the run."""
    before: list[dict[str, Any]] = field(default_factory=list)

    def state(self, consumed_samples: int) -> dict[str, Any]:
        """For ``state.json``: the description, the range of samples [first, last), and how many came from each
        source.
        """
        return {
            **self.description,
            "first_sample": self.first_sample,
            "last_sample": consumed_samples,
            "consumed": self._consumed(consumed_samples),
            "before": self.before,
        }

    def describe(self, first_sample: int, num_samples: int) -> str:
        """Where some samples of this segment come from, in words: ``documents 3, 5 and 9 of PREFIX``."""
        found = self.train.documents(np.arange(first_sample, first_sample + num_samples))
        phrases = []
        for prefix, documents in found.items():
            shown = ", ".join(map(str, documents[:_SHOWN].tolist()))
            more = len(documents) - _SHOWN
            phrases.append(f"documents {shown}{f' and {more} more' if more > 0 else ''} of {prefix}")
        return "; ".join(phrases)

    def _consumed(self, consumed_samples: int) -> dict[str, int]:
        total: dict[str, int] = {}
        for first in range(self.first_sample, consumed_samples, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, consumed_samples))
            for source, count in self.train.sources(numbers).items():
                total[source] = total.get(source, 0) + count
        return total

    def resume(self, saved: dict[str, Any], consumed_samples: int) -> list[str]:
        """Go on after ``saved``, the ``state`` of a checkpoint; returns what the user should know, a line each.

        Raises:
            CheckpointError: the rules of the other year made the checkpoint's order.
        """
        theirs, mine = saved.get("megatron_compat", 2026), self.description["megatron_compat"]
        if theirs != mine:
            raise CheckpointError(
                f"the checkpoint's data order follows --megatron-compat {theirs}, this command's {mine}. Give "
                f"--megatron-compat {theirs} to read on, or --finetune to start anew from the weights"
            )
        if "train" not in saved:
            self.first_sample = consumed_samples
            return [
                f"the checkpoint does not say what its {consumed_samples} samples were: another program read them. "
                "Those from that number on are of this command's data"
            ]
        changed = _differences(saved, {key: value for key, value in self.description.items() if key != "paths"})
        earlier = list(saved.get("before", []))
        if not changed:
            self.first_sample, self.before = saved["first_sample"], earlier
            return []
        if "first_sample" in saved:  # else it is of a version that recorded less
            earlier.append({key: value for key, value in saved.items() if key != "before"})
        self.first_sample, self.before = consumed_samples, earlier
        return [
            f"the order of the training samples from {consumed_samples} on is not the one the checkpoint was reading: "
            f"{'; '.join(changed)}. Some samples may come twice and some not at all"
        ]


def _differences(saved: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """A phrase for each entry that is not as it was."""
    found = []
    for key, value in mine.items():
        old = saved.get(key)
        if old == value:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            found += _differences(old, value)
        elif key in ("data", "sets"):
            found.append("the token files are others")
        else:
            found.append(f"{key} was {old} and is {value}")
    return found
