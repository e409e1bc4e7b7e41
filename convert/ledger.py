"""Nothing is lost and nothing is made up: every tensor of the source is used once, every one of the target filled
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from trimegatron.errors import CheckpointError

T = TypeVar("T")
SHOWN = 8


def match(
    source: Mapping[str, T], rename: Callable[[str], str | None], targets: Iterable[str], *, where: object
) -> dict[str, T]:
    """The source's entries under the target's names.

    Args:
        rename: the target's name for one of the source's, None where it has none.
        targets: every name that must be filled.
        where: what the source is called in an error.

    Raises:
        CheckpointError: an entry has no place, two have the same, or a place stays empty; all of them are listed.
    """
    wanted = set(targets)
    found: dict[str, T] = {}
    foreign, twice = [], []
    for name, entry in source.items():
        target = rename(name)
        if target is None or target not in wanted:
            foreign.append(name)
        elif target in found:
            twice.append(f"{name} (also {target})")
        else:
            found[target] = entry
    missing = [name for name in sorted(wanted) if name not in found]
    problems = [
        f"{what}: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for what, names in (
            ("tensors that have no place in the target", foreign),
            ("tensors for one place of the target", twice),
            ("missing from the source is what becomes", missing),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{where} cannot be converted: {'; '.join(problems)}")
    return found


def check_shapes(
    tensors: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, where: object
) -> None:
    """Refuse tensors that are not of the size the configuration says.

    Raises:
        CheckpointError: the ones that are not, each with both sizes.
    """
    wrong = [
        f"{name} is {list(shape)} and must be {list(expected[name])}"
        for name, shape in tensors.items()
        if tuple(shape) != tuple(expected[name])
    ]
    if wrong:
        raise CheckpointError(f"{where} does not match its configuration: {'; '.join(wrong[:SHOWN])}")
