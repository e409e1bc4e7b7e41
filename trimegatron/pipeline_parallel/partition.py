"""Which layers live on which pipeline stage."""

from __future__ import annotations


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """The global numbers of the layers of ``stage``: equal, consecutive runs."""
    assert num_layers % num_stages == 0, "checked when the configuration is built"
    per_stage = num_layers // num_stages
    return range(stage * per_stage, (stage + 1) * per_stage)
