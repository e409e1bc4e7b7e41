"""Tables of launch configurations, and which one a device goes by.

A configuration is a pure function of op, dtype, shape and device. The first of these that knows it says it:

1. the user's table (``--kernel-table FILE``);
2. the packaged table for exactly this device, ``kernels/tuned/<device name>.json``;
3. the heuristic beside the kernel.

``trimegatron tune`` writes tables, nothing here measures. A record counts while its kernel's source is the one that
was timed; what is left out for that is said in one line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trimegatron.kernels.configs import TUNED_OPS, Config, Key, Shape, key_of
from trimegatron.kernels.source_hash import source_hash

FORMAT = 1
FOLDER = Path(__file__).parent / "tuned"
INTERPRETER = "Triton's interpreter"
"""Where kernels run that run on no GPU."""
DTYPES = ("bfloat16", "float16", "float32")
MOST = {"rows": 1 << 16, "columns": 1 << 16, "num_warps": 32}

_log = logging.getLogger(__name__)


class TableError(ValueError):
    """A file is no table that can be used here; the message names file, record, value and rule."""


@dataclass(frozen=True)
class Table:
    """The records of one file that count, and what it says of itself."""

    path: Path
    device: str
    settings: Mapping[Key, dict[str, int]]
    """Fields of ``Config`` by record."""
    outdated: tuple[str, ...]
    """Ops with records of another version of their kernel; these are not in ``settings``."""

    def warning(self) -> str | None:
        """The one line that says what is left out."""
        if not self.outdated:
            return None
        names = ", ".join(sorted(set(self.outdated)))
        return (
            f"{self.path}: {len(self.outdated)} records are of other versions of their kernels ({names}) and are "
            "ignored. Run trimegatron tune again"
        )


def file_name(device: str) -> str:
    """ "NVIDIA H200" -> "NVIDIA_H200.json"."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device).strip("_") + ".json"


def device_name(device: torch.device) -> str:
    """What tables call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER


def read_table(path: Path) -> Table:
    """Read and check a table, and leave out the records of other versions of their kernels.

    Raises:
        TableError: the file cannot be read, or is not such a table.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path} must be a table that trimegatron tune wrote; it cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("records"), list):
        raise TableError(
            f'{path} must be a table that trimegatron tune wrote: an object with "format": {FORMAT} and "records"'
        )
    if not isinstance(content.get("device"), str):
        raise TableError(f'{path} must name the device it is for: "device" is {content.get("device")!r}')
    settings: dict[Key, dict[str, int]] = {}
    outdated = []
    for index, record in enumerate(content["records"]):
        try:
            key = _check_record(record)
        except TableError as error:
            raise TableError(f"{path}, record {index}: {error}") from None
        if key in settings:
            raise TableError(f"{path}, record {index}: there is another one for {key}. Leave one of the two out")
        op = TUNED_OPS[key[0]]
        if record["source"] == source_hash(op.module, op.kernel):
            settings[key] = record["config"]
        else:
            outdated.append(key[0])
    return Table(path, content["device"], settings, tuple(outdated))


def _check_record(record: Any) -> Key:
    """Raises TableError."""

    def check(condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise TableError(f"{name} ({record.get(name)!r}) must {rule}")

    if not isinstance(record, dict):
        raise TableError(f"must be an object; got {record!r}")
    check(record.get("op") in TUNED_OPS, "op", f"be one of {', '.join(TUNED_OPS)}")
    op = TUNED_OPS[record["op"]]
    check(record.get("dtype") in DTYPES, "dtype", f"be one of {', '.join(DTYPES)}")
    check(isinstance(record.get("source"), str), "source", "be the hash of the kernel's source")
    for name, fields in (("shape", op.shape), ("config", op.parameters)):
        values = record.get(name)
        right = isinstance(values, dict) and set(values) == set(fields)
        check(
            right and all(isinstance(value, int) for value in record[name].values()),
            name,
            f"hold {', '.join(fields) or 'nothing'} as whole numbers or booleans",
        )
    key = key_of(record["op"], record["dtype"], record["shape"])
    check(dict(key[2]) == record["shape"], "shape", "hold powers of two, the ends of buckets")
    for name, value in record["config"].items():
        if name == "num_stages":
            right, rule = 1 <= value <= 8, "from 1 to 8"
        else:
            least = op.least_columns if name == "columns" else 1
            right = least <= value <= MOST[name] and value & (value - 1) == 0
            rule = f"a power of two from {least} to {MOST[name]}"
        if isinstance(value, bool) or not right:
            raise TableError(f"{name} ({value!r}) of {record['op']} must be {rule}")
    return key


@dataclass(frozen=True)
class Choice:
    """What one device goes by: tables, the first one first. None of them is the heuristics."""

    tables: tuple[Table, ...] = ()
    settings: Mapping[Key, dict[str, int]] = field(default_factory=dict)
    _configs: dict[tuple[Any, ...], Config] = field(default_factory=dict)

    @staticmethod
    def of(*tables: Table) -> Choice:
        settings: dict[Key, dict[str, int]] = {}
        for table in reversed(tables):
            settings |= table.settings
        return Choice(tables, settings)

    def config(self, op: str, heuristic: Config, dtype: torch.dtype, shape: Shape) -> Config:
        """Looked up once for every op, dtype and shape."""
        kind = (op, dtype, *shape.values())
        config = self._configs.get(kind)
        if config is None:
            settings = self.settings.get(key_of(op, str(dtype).removeprefix("torch."), shape), {})
            config = self._configs[kind] = replace(heuristic, **settings)
        return config

    @property
    def digest(self) -> str:
        """Equal where all configurations are: 12 hexadecimal digits, "none" without a record."""
        if not self.settings:
            return "none"
        text = json.dumps(sorted([*key, sorted(config.items())] for key, config in self.settings.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def warnings(self) -> list[str]:
        return [line for table in self.tables if (line := table.warning())]


choices: dict[torch.device, Choice] = {}
"""By device, from the first launch on it or from ``choose`` on."""


def choose(device: torch.device, user: Path | None = None, *, packaged: bool = True) -> Choice:
    """Decide what ``device`` goes by from now on.

    Args:
        user: a table that goes before the packaged one.
        packaged: whether that one, where there is one, counts at all.

    Raises:
        TableError: the user's table cannot be used, or is for another device.
    """
    name = device_name(device)
    tables = []
    if user is not None:
        tables.append(read_table(user))
        if tables[0].device != name:
            raise TableError(f"{user} must be for this device, {name}; it was made on {tables[0].device}")
    path = FOLDER / file_name(name)
    if packaged and path.is_file():
        table = read_table(path)
        assert table.device == name, f"{path} is for {table.device}"
        tables.append(table)
    choices[device] = choice = Choice.of(*tables)
    return choice


def choice_of(device: torch.device) -> Choice:
    """What ``device`` goes by. Nothing runs on the meta device, where there is no table."""
    choice = choices.get(device)
    if choice is None:
        if device.type == "meta":
            choice = choices[device] = Choice()
        else:
            choice = choose(device)
            for line in choice.warnings():
                _log.warning("%s", line)
    return choice
