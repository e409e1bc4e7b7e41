"""``PREFIX.meta.json`` beside a pair: how the tokens were made. Ours; files of Megatron-LM's own have none.

The pair itself stays byte for byte Megatron's, so what it cannot say lies in this third file: above all by which
Megatron's rules (``megatron_compat``, 2022 or 2026) documents became tokens. Nothing needs the file to read the data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimegatron.errors import DataError


def meta_path(prefix: str | Path) -> Path:
    """``PREFIX.meta.json``."""
    return Path(f"{prefix}.meta.json")


def pack_metadata(metadata: dict[str, Any]) -> str:
    """The text of the file."""
    return json.dumps(metadata, indent=2, ensure_ascii=False) + "\n"


def read_metadata(prefix: str | Path) -> dict[str, Any]:
    """What the file says, {} where there is none. Raises DataError when it is not a JSON object."""
    path = meta_path(prefix)
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); remove it, the data can be read without") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: not a JSON object; remove it, the data can be read without")
    return found
