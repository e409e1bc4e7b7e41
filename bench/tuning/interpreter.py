"""Checks candidates in Triton's interpreter, which a process has to be started for: the one that compiles cannot.

``python -m trimegatron.bench.tuning.interpreter`` is that process: a line of JSON in, a line of JSON out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import torch

from trimegatron.bench.tuning.targets import Settings, Target, Work, why_wrong
from trimegatron.kernels.configs import key_text


class Interpreter:
    """The process, seen from outside; a context."""

    def __enter__(self) -> Interpreter:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trimegatron.bench.tuning.interpreter"],
            env=os.environ | {"TRITON_INTERPRET": "1"}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def why_wrong(self, target: Target, settings: Settings) -> str | None:
        """``targets.why_wrong`` on the CPU."""
        works = [dataclasses.asdict(work) for work in target.work.checked_at()]
        question = {"key": target.key, "case": target.case, "works": works, "settings": settings}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the interpreter's process ended with {self._process.wait()} at {key_text(target.key)}")
        return json.loads(line)


def _answer(question: dict[str, Any]) -> str | None:
    op, dtype, shape = question["key"]
    key = (op, dtype, tuple((name, size) for name, size in shape))
    works = [Work(**work) for work in question["works"]]
    return why_wrong(key, question["case"], works, question["settings"], torch.device("cpu"))


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)
