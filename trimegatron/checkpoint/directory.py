"""The folder that a run saves into: which checkpoints are there, which are complete, which is the newest.

::

    <save>/latest_checkpointed_iteration.txt      the newest complete one, replaced atomically
    <save>/iter_0000100/                          complete when manifest.json is there, which is written last
    <save>/metrics.jsonl
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from trimegatron.background import Task
from trimegatron.errors import CheckpointError
from trimegatron.files import sync_file, sync_folder, write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
METRICS = "metrics.jsonl"
MANIFEST = "manifest.json"
STATE = "state.json"
FOLDER_NAME = re.compile(r"\.?iter_(\d{7,})(?:\.replaced)?")
TOKENIZER = "tokenizer"
MARK = ".seen-"
"""Begins the name of a file that all ranks look for when a run starts (``check_is_shared``)."""
LIFE_OF_A_MARK = 3600.0
"""Seconds; where a start takes longer to look for a file, it is dead."""


def checkpoint_folder(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def temporary_folder(root: Path, iteration: int) -> Path:
    """Where a checkpoint is written until it is whole."""
    return root / f".iter_{iteration:07d}.tmp"


def replaced_folder(folder: Path) -> Path:
    """Where a complete checkpoint waits while another of the same iteration takes its name."""
    return folder.with_name(f".{folder.name}.replaced")


def clear_leftovers(root: Path) -> None:
    """What killed runs left half-written, or half-removed, goes; and the marks of their starts, when these are so old
    that no run is looking for them."""
    for leftover in root.glob(".iter_*.tmp"):
        shutil.rmtree(leftover)
    for name in (TRACKER, METRICS):
        for leftover in root.glob(f".{name}.*.tmp"):
            leftover.unlink()
    for mark in root.glob(f"{MARK}*"):
        with suppress(FileNotFoundError):  # it was seen meanwhile
            if time.time() - mark.stat().st_mtime > LIFE_OF_A_MARK:
                mark.unlink()


def flush_files(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Flush written files to the disk, and hash them meanwhile; the manifest's entries for them: size and SHA-256 by
    name."""
    entries = {}
    for path in sorted(paths):
        flush = Task(partial(sync_file, path))
        flush.start()
        entries[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        flush.wait()
    return entries


def publish(temporary: Path, final: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Make a written and flushed folder a complete checkpoint: manifest, rename, tracker. One rank calls it."""
    for folder in [path for path in temporary.rglob("*") if path.is_dir()]:
        sync_folder(folder)
    write_atomically(temporary / MANIFEST, json.dumps({"files": entries}, indent=1) + "\n")
    replaced = replaced_folder(final)
    if final.exists():  # the same iteration was saved before; find_checkpoint knows it under either name
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(final.parent)
    write_atomically(final.parent / TRACKER, str(iteration_of(final)))
    shutil.rmtree(replaced, ignore_errors=True)


def outdated(newest: Path, num_kept: int, retain_interval: int | None) -> list[Path]:
    """Which checkpoints before ``newest`` are not kept: all but the last ``num_kept`` complete ones, it among them, and
    those at multiples of ``retain_interval``. What lies beyond ``newest`` is another branch of the run, and stays.
    """
    last, found, missing = iteration_of(newest), [], num_kept - 1
    for folder in sorted(checkpoints(newest.parent), key=iteration_of, reverse=True):
        iteration = iteration_of(folder)
        if iteration >= last or (retain_interval is not None and iteration % retain_interval == 0):
            continue
        if missing == 0:
            found.append(folder)
        elif problem_with(folder) is None:
            missing -= 1
    return found


def remove(folder: Path) -> None:
    """Remove a checkpoint; killed meanwhile, there is none of its name, and the next save removes the rest."""
    temporary = temporary_folder(folder.parent, iteration_of(folder))
    folder.rename(temporary)
    shutil.rmtree(temporary)


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def change_since(folder: Path, entries: dict[str, dict[str, Any]]) -> str | None:
    """Which file is no longer what its entry says, or None; read from the disk where the system can do that."""
    for name, entry in sorted(entries.items()):
        path = folder / name
        if hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if file_hash(path) != entry["sha256"]:
            return f"{path} is damaged: its SHA-256 is not the manifest's"
    return None


def problem_with(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be used, or None: every file of its manifest must be there in its size."""
    return next(problems_with(folder), None)


def problems_with(folder: Path) -> Iterator[str]:
    """Every reason why a checkpoint folder cannot be used, as far as it shows without reading the files."""
    try:
        files = manifest_files(folder)
    except FileNotFoundError:
        yield f"it has no {MANIFEST}: it was not finished"
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"its {MANIFEST} cannot be read ({error})"
        return
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != entry["bytes"]:
            yield f"{name} has {path.stat().st_size} bytes where the manifest says {entry['bytes']}"


def manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifest's entries, size and SHA-256 by name."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    if not all({"bytes", "sha256"} <= entry.keys() for entry in files.values()):
        raise ValueError("an entry lacks its size or its hash")
    return files


def damage_in(folder: Path, *, share: int = 0, shares: int = 1) -> str | None:
    """Which file is not what was saved, by the manifest's SHA-256, or None; of several ranks each takes its share."""
    files = sorted(json.loads((folder / MANIFEST).read_text())["files"].items())
    return change_since(folder, dict(files[share::shares]))


def find_checkpoint(root: Path, *, log=print, without: Collection[Path] = ()) -> Path | None:
    """The newest complete checkpoint under ``root``, or None; says which ones were passed over, and why.

    The newest is the one that the tracker names; where that cannot be used, the complete one of the highest
    iteration. ``root`` may also be the folder of one checkpoint. Those in ``without`` are known to be damaged.
    """
    if is_one_checkpoint(root):
        problem = problem_with(root)
        if problem is not None:
            raise CheckpointError(f"checkpoint {root} cannot be used: {problem}")
        return root
    folders = sorted(set(checkpoints(root)) - set(without), key=iteration_of, reverse=True)
    named = tracked_iteration(root)
    folders.sort(key=lambda folder: iteration_of(folder) != named)  # stable: the named one first, then downwards
    for folder in folders:
        problem = problem_with(folder)
        if problem is None:
            return folder
        log(f"checkpoint {folder} is passed over: {problem}")
    return None


def is_one_checkpoint(root: Path) -> bool:
    return (root / MANIFEST).is_file() or (root / STATE).is_file()


def checkpoints(root: Path) -> list[Path]:
    """Every folder that has a checkpoint's name, complete or not."""
    return [path for path in root.glob("*iter_*") if FOLDER_NAME.fullmatch(path.name) and path.is_dir()]


def iteration_of(folder: Path) -> int:
    match = FOLDER_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def tracked_iteration(root: Path) -> int | None:
    """What the tracker says, or None where there is none or it cannot be read."""
    try:
        return int((root / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def require_checkpoint(root: Path, *, log=print, without: Collection[Path] = ()) -> Path:
    """:func:`find_checkpoint`, where there must be one.

    Raises:
        CheckpointError: there is none.
    """
    if not root.exists():
        raise CheckpointError(f"--load ({root}) does not exist. Give the folder that a run saved into with --save")
    found = find_checkpoint(root, log=log, without=without)
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
