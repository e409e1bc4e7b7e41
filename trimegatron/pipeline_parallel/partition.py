"""Which layers live on which pipeline stage."""

from __future__ import annotations


def partition_layers(
    num_layers: int, num_stages: int, *, first: int | None = None, last: int | None = None
) -> list[range]:
    """The global numbers of each stage's layers, stage after stage: consecutive runs.

    ``first`` and ``last`` are the sizes of the first and the last stage, where these differ; the others share the
    rest equally.
    """
    sizes: list[int | None] = [None] * num_stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    rest, middle = num_layers - sum(size or 0 for size in sizes), sizes.count(None)
    assert rest % middle == 0 if middle else rest == 0, "checked when the configuration is built"
    stages, start = [], 0
    for size in sizes:
        stop = start + (rest // middle if size is None else size)
        stages.append(range(start, stop))
        start = stop
    return stages
