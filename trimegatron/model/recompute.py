"""What backward computes a second time instead of keeping it: whole layers, or the attention core alone.

Nothing random has to be put back for the replay: dropout masks are functions of place (docs/architecture.md), so it
gives the same bits. Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


class Run(NamedTuple):
    """Consecutive layers of a stage, ``start`` … ``stop`` − 1. Where it is replayed, only what enters it is kept."""

    start: int
    stop: int
    is_replayed: bool


@dataclass(frozen=True)
class Recompute:
    """Megatron's ``--recompute-granularity``, ``--recompute-method`` and ``--recompute-num-layers``.

    "selective" replays the attention core of every layer: its scores and probabilities, [b, n, s, s] each, are not
    kept. "full" replays layers: by the method "uniform" all of them, in runs of ``num_layers``; by "block" the first
    ``num_layers`` of each stage (of each virtual stage where there are any), one by one.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1

    @property
    def replays_core(self) -> bool:
        return self.granularity == "selective"

    def runs(self, num_layers: int) -> list[Run]:
        """The ``num_layers`` layers of a stage, cut into runs."""
        if self.granularity != "full":
            return [Run(0, num_layers, False)]
        is_block = self.method == "block"
        size = 1 if is_block else self.num_layers
        stop = min(self.num_layers, num_layers) if is_block else num_layers
        replayed = [Run(start, min(start + size, stop), True) for start in range(0, stop, size)]
        return [*replayed, Run(stop, num_layers, False)] if stop < num_layers else replayed


def replay(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``function``(*args), which backward calls again for what it needs; it keeps ``args`` only."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
