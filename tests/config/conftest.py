from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.train_line import make_files


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test, with the files that ``train_line`` names."""
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
