"""What every benchmark writes, and ``trimegatron bench report`` reads: one JSON object, whole or not at all.

{"format": 1, "benchmark": "memory", "date": …, "revision": …, "dirty": false, "machine": {…}, "versions": {…},
 "command": ["trimegatron", "bench", "memory", …],
 "cases": [{"case": …, "variant": …, "figure": …, "unit": …, "values": [one for each repeat], "better": "lower",
            "floor": null, "parameters": {…}, "measured": false, "note": ""}, …]}
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trimegatron.errors import ConfigError
from trimegatron.files import write_atomically

FORMAT = 1
OURS = "trimegatron"
"""The variant that is ours, where there are others."""
ROOT = Path(__file__).resolve().parent.parent

Parameter = str | int | float | bool


@dataclass(frozen=True)
class Result:
    """One figure of one variant in one case; ``counted`` and ``measured`` make them."""

    case: str
    """What was done: "layer_norm_forward"."""
    variant: str
    """Who did it: ``OURS``, "eager", "Megatron-LM"."""
    figure: str
    """What was found: "time", "peak memory"."""
    unit: str
    """"s" and "bytes" are shown with prefixes, all others as they are."""
    values: list[float]
    """One for each repeat."""
    better: str = "lower"
    """Or "higher"."""
    floor: float | None = None
    """The best value there can be, in the direction of ``better``: a least number of bytes, a copy's bandwidth."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """All that the value depends on, beside the machine. Numbers that differ between results make plots of growth;
    of a time, "flops" and "bytes" of one call place it on the roofline."""
    measured: bool = True
    """Or counted, and so the same on every machine."""
    note: str = ""
    """Shown beside the value, never compared."""

    @cached_property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two runs must share to be compared."""
        return self.case, self.variant, self.figure, self.unit, tuple(sorted(self.parameters.items()))


def counted(
    case: str,
    variant: str,
    figure: str,
    unit: str,
    value: float,
    *,
    better: str = "lower",
    floor: float | None = None,
    note: str = "",
    **parameters: Parameter,
) -> Result:
    """A figure that is the same on every machine."""
    return Result(case, variant, figure, unit, [value], better, floor, parameters, False, note)


def measured(
    case: str,
    variant: str,
    figure: str,
    unit: str,
    values: Sequence[float],
    *,
    better: str = "lower",
    floor: float | None = None,
    note: str = "",
    **parameters: Parameter,
) -> Result:
    """A figure of this machine, one value for each repeat."""
    return Result(case, variant, figure, unit, list(values), better, floor, parameters, True, note)


@dataclass(frozen=True)
class Run:
    """One run of one benchmark."""

    benchmark: str
    date: str
    """Of its start, ISO 8601, UTC."""
    revision: str | None
    """Of the source; None where it is not under git."""
    dirty: bool
    """Whether the source differed from that revision."""
    machine: dict[str, Any]
    versions: dict[str, str | None]
    command: list[str]
    cases: list[Result]


def write_run(run: Run, path: Path | None) -> None:
    """Check as a reader would, and write the file if there is to be one."""
    found: dict[str, Any] = {"format": FORMAT} | asdict(run)
    check(found, "this run")
    if path is not None:
        cases = ",\n  ".join(json.dumps(case, ensure_ascii=False) for case in found.pop("cases"))
        head = json.dumps(found, indent=1, ensure_ascii=False).removesuffix("\n}")
        write_atomically(path, f'{head},\n "cases": [\n  {cases}\n ]\n}}\n')


def read_run(path: Path) -> Run:
    """Read and check one file.

    Raises:
        ConfigError: the file cannot be read, or is not of this form.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Write it again with `trimegatron bench NAME --out`.") from None
    check(found, str(path))
    found.pop("format")
    return Run(**found | {"cases": [Result(**case) for case in found["cases"]]})


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Of files, and of all JSON files in folders, by name.

    Raises:
        ConfigError: a folder without any, or what ``read_run`` raises.
    """
    runs = []
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(
                f"{path} must hold results of `trimegatron bench NAME --out FILE`; it holds no JSON file."
            )
        runs += [read_run(file) for file in files]
    return runs


_NUMBER = (int, float)
_RUN = {
    "format": int, "benchmark": str, "date": str, "revision": (str, type(None)), "dirty": bool, "machine": dict,
    "versions": dict, "command": list, "cases": list,
}  # fmt: skip
_RESULT = {
    "case": str, "variant": str, "figure": str, "unit": str, "values": list, "better": str,
    "floor": (*_NUMBER, type(None)), "parameters": dict, "measured": bool, "note": str,
}  # fmt: skip


def check(found: Any, where: str) -> None:
    """Hold a file's object against the form.

    Raises:
        ConfigError: the key, the value and the rule.
    """
    _check_keys(found, _RUN, where)
    if found["format"] != FORMAT:
        raise ConfigError(f"{where}: format ({found['format']}) must be {FORMAT}. Run the benchmark again.")
    for position, case in enumerate(found["cases"]):
        here = f"{where}, cases[{position}]"
        _check_keys(case, _RESULT, here)
        numbers = [*case["values"], *([] if case["floor"] is None else [case["floor"]])]
        if not case["values"] or not all(_is_number(number) for number in numbers):
            raise ConfigError(f"{here}: values {case['values']} and floor {case['floor']} must be finite numbers.")
        if case["better"] not in ("lower", "higher"):
            raise ConfigError(f"{here}: better ({case['better']!r}) must be 'lower' or 'higher'.")
        if not all(isinstance(value, str | int | float) for value in case["parameters"].values()):
            raise ConfigError(f"{here}: parameters must be texts, numbers and truth values: {case['parameters']}.")
    identities = Counter(Result(**case).identity for case in found["cases"])
    twice = [identity for identity, count in identities.items() if count > 1]
    if twice:
        raise ConfigError(f"{where}: {twice[0]} is there twice; a parameter must tell the two apart.")


def _check_keys(found: Any, types: Mapping[str, Any], where: str) -> None:
    if not isinstance(found, dict) or set(found) != set(types):
        keys = list(found) if isinstance(found, dict) else type(found).__name__
        raise ConfigError(
            f"{where}: must be an object of {', '.join(types)}; got {keys}. It is no result of a benchmark."
        )
    for name, kind in types.items():
        if not isinstance(found[name], kind) or (kind is not bool and isinstance(found[name], bool)):
            raise ConfigError(f"{where}: {name} ({found[name]!r}) is of the wrong type.")


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool) and math.isfinite(value)


def source_revision() -> tuple[str | None, bool]:
    """The commit of this source, and whether code differs from it; None where the source is not a git checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:  # installed below somebody's own checkout
            return None, False
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!*.md")
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None, False
