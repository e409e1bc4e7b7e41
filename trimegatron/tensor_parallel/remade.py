"""Tensors that backward makes again instead of keeping them.

A matrix product keeps its input for the weight gradient. Where that input is a cheap function of tensors that are kept
anyway, as the output of a norm or of an activation is, keeping it as well is memory for nothing: the product keeps the
function and its arguments, and its backward calls it again just before the weight gradient. The same function of the
same tensors gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Remade(NamedTuple):
    """A tensor with its recipe: ``value`` = ``function``(*``sources``).

    Gradients flow through ``value``; ``sources`` are cut from the graph, and are what an autograd Function keeps.
    """

    value: torch.Tensor
    function: Callable[..., torch.Tensor]
    sources: tuple[torch.Tensor, ...]

    @classmethod
    def by(cls, function: Callable[..., torch.Tensor], *sources: torch.Tensor) -> Remade:
        """What ``function``, which is pure, makes of ``sources``."""
        return cls.with_recipe(function(*sources), function, *sources)

    @classmethod
    def with_recipe(cls, value: torch.Tensor, function: Callable[..., torch.Tensor], *sources: torch.Tensor) -> Remade:
        """``value``, made otherwise, of which ``function``, which is pure, makes the same again out of ``sources``."""
        return cls(value, function, tuple(source.detach() for source in sources))

    @classmethod
    def of(cls, x: torch.Tensor | Remade) -> Remade:
        """Any tensor: one without a recipe is its own source."""
        return x if isinstance(x, Remade) else cls(x, _itself, (x.detach(),))


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x
