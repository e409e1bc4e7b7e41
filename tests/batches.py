"""Small inputs in many batches."""

from __future__ import annotations

import pytest

from trimegatron.preprocess.engine import GigatokenEngine, TokenizersEngine


def small_batches(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let preprocessing take about ``num_bytes`` at a time, whatever the engine."""
    for engine in (TokenizersEngine, GigatokenEngine):
        monkeypatch.setattr(engine, "batch_bytes", num_bytes)
