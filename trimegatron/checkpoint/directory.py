"""The folder that a run saves into: which checkpoints are there, which are complete, which is the newest.

::

    <save>/latest_checkpointed_iteration.txt      the newest complete one, replaced atomically
    <save>/iter_0000100/                          complete when manifest.json is there, which is written last
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimegatron.errors import CheckpointError
from trimegatron.files import sync_file, sync_folder, write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
TOKENIZER = "tokenizer"


def checkpoint_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def temporary_folder(root: Path, iteration: int) -> Path:
    """Where a checkpoint is written until it is whole."""
    return root / f".iter_{iteration:07d}.tmp"


def prepare(root: Path, iteration: int) -> None:
    """An empty temporary folder; what killed runs left half-written goes."""
    for leftover in root.glob(".iter_*"):
        shutil.rmtree(leftover)
    temporary_folder(root, iteration).mkdir(parents=True)


def publish(temporary: Path, final: Path) -> None:
    """Make a written folder a complete checkpoint: manifest, flush, rename, tracker. One rank calls it, after all
    have written.
    """
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    entries = {
        str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in files
    }
    for path in files:
        sync_file(path)
    for folder in [path for path in temporary.rglob("*") if path.is_dir()]:
        sync_folder(folder)
    write_atomically(temporary / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():  # the same iteration was saved before
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    write_atomically(final.parent / TRACKER, str(int(final.name.removeprefix("iter_"))))
    shutil.rmtree(replaced, ignore_errors=True)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be used, or None: every file of its manifest must be there in its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not finished"
    except (ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes where the manifest says {entry['bytes']}"
    return None


def find_checkpoint(root: Path, *, log=print) -> Path | None:
    """The newest complete checkpoint under ``root``, or None; says which ones were passed over, and why.

    ``root`` may also be the folder of one checkpoint.
    """
    if (root / MANIFEST).is_file():
        return root
    folders = [path for path in root.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", path.name) and path.is_dir()]
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix("iter_")), reverse=True):
        problem = problem_with(folder)
        if problem is None:
            return folder
        log(f"checkpoint {folder} is passed over: {problem}")
    return None


def require_checkpoint(root: Path, *, log=print) -> Path:
    """:func:`find_checkpoint`, where there must be one.

    Raises:
        CheckpointError: there is none.
    """
    if not root.exists():
        raise CheckpointError(f"--load ({root}) does not exist. Give the folder that a run saved into with --save")
    found = find_checkpoint(root, log=log)
    if found is None:
        raise CheckpointError(
            f"--load ({root}) holds no complete checkpoint. Give the folder that a run saved into with --save"
        )
    return found


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while a checkpoint's files are read into a CheckpointError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {type(error).__name__}: {error}") from error
