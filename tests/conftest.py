"""One thread for the whole test process: its forked ranks hang otherwise, and sums come out alike everywhere."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small set of documents to train on, of the test file's own."""
    from tests.runs import write_corpus  # imports the trainer, which few test files need

    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(prefix)
    return prefix
