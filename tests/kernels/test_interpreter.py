from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreter"


def test_values_and_gradients_in_the_interpreter() -> None:
    """Runs ``tests/kernels/interpreter``; its conftest says why in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
        cwd=FOLDER.parents[2], env=os.environ | {"TRITON_INTERPRET": "1"}, text=True, capture_output=True,
    )  # fmt: skip
    print(done.stdout[-20_000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 200 and "skipped" not in done.stdout
