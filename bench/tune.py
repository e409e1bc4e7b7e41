"""``trimegatron tune``: launch configurations of the kernels, found by timing them on the GPU that is here.

Every configuration near a kernel's heuristic is compiled and dropped where the code spills, needs more shared memory
than there is or loses its 128-bit accesses; compared with the eager reference; and timed. The heuristic's stays unless
another is 3 % faster. The result is a table for ``trimegatron train --kernel-table`` (docs/tuning.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trimegatron.bench.measure import Figures
from trimegatron.config.flags import parse
from trimegatron.config.options import Options, fail, kebab, option
from trimegatron.errors import ConfigError
from trimegatron.files import write_atomically
from trimegatron.kernels import tables
from trimegatron.kernels.configs import TUNED_OPS, Key, key_of, key_text

if TYPE_CHECKING:
    from trimegatron.bench.tuning.machine import Machine
    from trimegatron.bench.tuning.targets import Work


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Options):
    """This command"""

    op: list[str] | None = option(
        None, "these kernels only, by the names that a dry run prints", derived="all", metavar="OP"
    )
    shape: list[str] | None = option(
        None, "rows=R,hidden=H: each op at these shapes", derived="usual ones", metavar="SHAPE"
    )
    dtype: str | None = option(
        None, "of the tensors", choices=tables.DTYPES, derived="the model's, bfloat16 without --model"
    )
    budget: float = option(600.0, "the search ends after these, and says what it left out", unit="seconds")
    out: Path | None = option(None, "the table to write, a new file", derived="DEVICE_NAME.json", metavar="FILE")
    dry_run: bool = option(
        False, "compile, drop and compare as always, without a GPU and without a time; writes nothing"
    )
    arch: int | None = option(
        None, "with --dry-run: compute capability to compile for", choices=(80, 90, 100), derived="90"
    )
    check: list[Path] | None = option(
        None, "only say which records of these tables count; of the packaged ones without a FILE", nargs="*",
        metavar="FILE",
    )  # fmt: skip
    merge: list[Path] | None = option(
        None, "only put these tables of one device together as --out; of two records of one kind the later file's",
        metavar="FILE",
    )  # fmt: skip


def main(argv: list[str]) -> int:
    """Tune; 1 where a default is wrong or a checked record does not count."""
    at = argv.index("--model") if "--model" in argv else len(argv)
    mine, flags = argv[:at], argv[at + 1 :] if at < len(argv) else None
    (config,) = parse(
        mine, TuneConfig, prog="trimegatron tune",
        description=" ".join((__doc__ or "").partition("\n\n")[2].replace("``", "").split()),
        epilog="--model FLAGS, the last option, takes all that follows as training flags, and tunes what one rank of "
        "that run launches.",
    )  # fmt: skip
    try:
        if config.check is not None:
            _refuse_others(config, "check", flags)
            return check(config.check)
        if config.merge is not None:
            _refuse_others(config, "merge", flags, "out")
            return merge(config.merge, config.out)
    except tables.TableError as error:
        raise ConfigError(f"--{'merge' if config.check is None else 'check'}: {error}") from None
    return tune(config, flags)


def _refuse_others(config: TuneConfig, name: str, flags: list[str] | None, *allowed: str) -> None:
    """Options that ``name`` would leave without effect."""
    default = TuneConfig()
    for other, value in vars(config).items():
        if other not in (name, *allowed) and value != getattr(default, other):
            fail(other, value, f"has no effect with {kebab(name)}", way_out="Leave one of the two out.")
    if flags is not None:
        fail("model", None, f"has no effect with {kebab(name)}", way_out="Leave one of the two out.")


def check(paths: list[Path]) -> int:
    """Say which records count; 1 where some do not."""
    paths = paths or sorted(tables.FOLDER.glob("*.json"))
    if not paths:
        print(f"no table is packaged ({tables.FOLDER}): every kernel goes by its heuristic")
    outdated = 0
    for path in paths:
        table = tables.read_table(path)
        outdated += len(table.outdated)
        print(table.warning() or f"{path}: all {len(table.settings)} records for {table.device} count")
    return 1 if outdated else 0


def merge(paths: list[Path], out: Path | None) -> int:
    """Write the records of all tables, which are of one device, into ``out``. Those that do not count are left out."""
    if out is None or out.exists():
        fail("out", out, "must be a new file with --merge", way_out="Name one.")
    read = [tables.read_table(path) for path in paths]
    if len({table.device for table in read}) > 1:
        devices = ", ".join(f"{table.path}: {table.device}" for table in read)
        fail("merge", None, "must have tables of one device", f"got {devices}", "Merge those of each device apart.")
    merged: dict[Key, Figures] = {}
    header: Figures = {}
    for path, table in zip(paths, read, strict=True):
        content = json.loads(path.read_text(encoding="utf-8"))
        for record in content.pop("records"):
            key = key_of(record["op"], record["dtype"], record["shape"])
            if key not in table.settings:
                continue
            if key in merged:
                print(f"{path} replaces the record of {key_text(key)}")
            merged[key] = record
        if warning := table.warning():
            print(warning)
        header = content
    write_atomically(out, json.dumps(header | {"records": list(merged.values())}, indent=1) + "\n")
    print(f"wrote {out}: {len(merged)} records")
    return 0


def tune(config: TuneConfig, flags: list[str] | None) -> int:
    """Search, and write the table of what was found."""
    from trimegatron.bench.tuning.machine import dry_machine, gpu_machine  # Triton, which only this needs

    _check(config, flags)
    works = _works(config, flags)
    out, machine = None, dry_machine(config.arch or 90)
    if not config.dry_run:
        out = config.out or Path(tables.file_name(torch.cuda.get_device_name()))
        if out.exists():
            fail("out", out, "must be a new file", "there is one", "Name another; --merge puts two together.")
        machine = gpu_machine(torch.device("cuda", torch.cuda.current_device()))
    with machine as there:
        records, all_right = search_all(works, config.op or list(TUNED_OPS), there, config.budget)
        if out is None:
            print("dry run: no time was measured, so nothing is decided and nothing written")
        elif records:
            write_atomically(out, json.dumps(there.header | {"records": records}, indent=1) + "\n")
            print(f"wrote {out}: {len(records)} records. Train with --kernel-table {out}")
        else:
            print("no record was made, so nothing is written")
    return 0 if all_right else 1


def _check(config: TuneConfig, flags: list[str] | None) -> None:
    """Raises ConfigError."""
    for op in config.op or []:
        if op not in TUNED_OPS:
            fail("op", op, f"must be one of {', '.join(TUNED_OPS)}")
    if not config.dry_run and (not torch.cuda.is_available() or torch.version.hip is not None):
        raise ConfigError(
            f"trimegatron tune must have an NVIDIA GPU that torch {torch.__version__} can use; there is none. Use "
            "--dry-run to do everything but time"
        )
    if config.arch is not None and not config.dry_run:
        fail("arch", config.arch, "needs --dry-run", way_out="Leave it out: the GPU says what it is.")
    if config.dry_run and config.out is not None:
        fail("out", config.out, "needs times, and --dry-run measures none", way_out="Leave one of the two out.")
    for name in ("shape", "dtype"):
        if flags is not None and getattr(config, name) is not None:
            fail(name, getattr(config, name), "and --model exclude each other", way_out="Leave one of the two out.")


def _works(config: TuneConfig, flags: list[str] | None) -> list[Work]:
    from trimegatron.bench.tuning import works as tuning_works

    if flags is not None:
        works, notes = tuning_works.of_model(flags)
        for note in notes:
            print(f"note: {note}")
        return works
    dtype = config.dtype or "bfloat16"
    if config.shape is None:
        return tuning_works.usual(dtype)
    return [work for text in config.shape for work in tuning_works.of_shape(text, dtype)]


def search_all(
    works: Sequence[Work], ops: Sequence[str], machine: Machine, budget: float
) -> tuple[list[Figures], bool]:
    """The records of ``ops`` at the shapes of ``works``, made within ``budget`` seconds, of which each has an equal
    share of what is left; and whether all defaults are right."""
    from trimegatron.bench.tuning.search import search
    from trimegatron.bench.tuning.targets import targets

    clock = machine.tools.clock
    end = clock() + budget
    todo = targets(works, ops, machine.arch)
    if not todo:
        fail("op", " ".join(ops), "must be launched at the shapes asked for; none is", way_out="Leave --shape out.")
    records, all_right = [], True
    for index, target in enumerate(todo):
        if clock() >= end:
            print(f"left out, the time was up: {', '.join(map(str, todo[index:]))}")
            break
        found = search(target, machine.tools, clock() + (end - clock()) / (len(todo) - index))
        print(found.text(), flush=True)
        all_right &= found.default.outcome == "right"
        if found.winner is not None:
            records.append(found.record(target.work.case(target.case, "meta").floor, machine.copy_rate))
    return records, all_right
