"""Values and gradients of the kernels in Triton's interpreter, which Triton must find switched on when it is imported.

Other tests import Triton without it, so ``tests/kernels/test_interpreter.py`` runs this folder in a process of its own.
By hand: ``TRITON_INTERPRET=1 pytest tests/kernels/interpreter``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.guards import Guards

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def guards() -> Iterator[Guards]:
    """Floating-point buffers of the launchers lie between NaNs and are full of them; both ends must survive."""
    torch.manual_seed(0)
    guarded = Guards()

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return guarded.empty(
            torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape), dtype
        )

    def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return guarded.empty(x.shape, dtype or x.dtype)

    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch, "empty_like", empty_like):
        yield guarded
    guarded.check()
