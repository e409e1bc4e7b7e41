"""Every option of a Megatron-LM GPT run is known, with its default, and does what the table says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.config.train_line import read
from trimegatron.config.compat import FOREIGN, Kind, MegatronConfig
from trimegatron.config.config import GROUPS
from trimegatron.config.flags import OptionParser, add_options, read_options
from trimegatron.errors import ConfigError

ROWS = [
    tuple(cell.strip() for cell in line.split("|"))
    for line in Path(__file__).with_name("megatron_flags.txt").read_text().splitlines()
    if not line.startswith("#")
]
ALL = [*GROUPS.values(), MegatronConfig]


def rows(*outcomes: str) -> list[tuple[str, ...]]:
    return [row for row in ROWS if row[3] in outcomes]


def test_the_table_is_whole() -> None:
    assert len(ROWS) == len({row[0] for row in ROWS}) == 127


@pytest.mark.parametrize(("flag", "default", "value", "outcome"), ROWS)
def test_known_with_its_default(flag: str, default: str, value: str, outcome: str) -> None:
    parser = OptionParser(prog="prog")
    for group in ALL:
        add_options(parser, group)
    found = parser.spellings[flag.replace("_", "-")].default
    if isinstance(found, float):
        assert found == float(default)
    else:
        assert ("required" if found is dataclasses.MISSING else str(found)) == default


@pytest.mark.parametrize("spell", [str, lambda flag: "--" + flag[2:].replace("-", "_")], ids=["as listed", "snake"])
@pytest.mark.parametrize(("flag", "default", "value", "outcome"), rows("option"))
def test_options_take_their_value(spell, flag: str, default: str, value: str, outcome: str) -> None:
    given = read_options([spell(flag), *value.split()], ALL, prog="prog", description="")
    (found,) = given.values.values()
    if isinstance(found, bool):
        assert str(found) != default
    elif isinstance(found, int | float):
        assert found == float(value)
    else:
        assert found in (value, [value], [int(word) for word in value.split() if word.isdigit()])


@pytest.mark.parametrize(("flag", "default", "value", "outcome"), rows("ignored"))
def test_ignored_options_are_noted(work: Path, flag: str, default: str, value: str, outcome: str) -> None:
    read_back = read(f"{flag} {value}")
    assert read_back.config == read().config
    if flag == "--local_rank":
        assert read_back.notes == []
    else:
        (note,) = read_back.notes
        assert note.startswith(f"{flag} ({value}) has no effect: " if value else f"{flag} has no effect: ")


@pytest.mark.parametrize(("flag", "default", "value", "outcome"), rows("later"))
def test_unsupported_values_are_refused(work: Path, flag: str, default: str, value: str, outcome: str) -> None:
    with pytest.raises(ConfigError, match="is not supported yet") as raised:
        read(f"{flag} {value}", world_size=2)
    assert str(raised.value).startswith(f"{flag} ({value})" if value else flag)
    if default not in ("None", "False"):  # the default itself may be given
        assert read(f"{flag} {default}", world_size=2).notes == []


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        ("--num-experts 8", "dense model"),
        ("--checkpoint-activations", "--recompute-granularity full"),
        ("--batch-size 8", "--micro-batch-size"),
        ("--warmup 0.1", "--lr-warmup-fraction"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size"),
    ],
)
def test_refused_for_good(work: Path, line: str, replacement: str) -> None:
    with pytest.raises(ConfigError, match="is not an option of trimegatron") as raised:
        read(line)
    assert replacement in str(raised.value)


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("--transformer-impl local --position-embedding-type learned_absolute --normalization LayerNorm", 0),
        ("--local-rank 0 --context-parallel-size 1 --data-impl mmap --lr-warmup-init 0", 0),
        ("--norm-epsilon 1e-6 --apply-query-key-layer-scaling --no-check-for-nan-in-loss-and-grad", 0),
        ("--ckpt-format torch_dist --auto-detect-ckpt-format --exit-on-missing-checkpoint", 3),
        ("--calculate-per-token-loss --log-throughput --lazy-mpu-init", 3),
        ("--save x --save-interval 5 --async-save --save-retain-interval 10 --keep-last 2 --exit-signal SIGUSR2", 0),
        ("--async-save --save-retain-interval 10 --keep-last 2 --on-save-error stop --hang-timeout-in-mins 1", 5),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 40000000", 0),
    ],
)
def test_options_of_todays_megatron(work: Path, line: str, notes: int) -> None:
    assert len(read(line).notes) == notes


@pytest.mark.parametrize(
    "line",
    [
        "--transformer-impl transformer_engine",
        "--position-embedding-type rope",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--swiglu",
        "--normalization RMSNorm",
        "--group-query-attention",
        "--num-query-groups 2",
        "--mock-data",
        "--context-parallel-size 2",
        "--wandb-project x",
    ],
)
def test_todays_options_that_are_not_here(work: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="is not supported yet") as raised:
        read(line)
    assert str(raised.value).startswith(line.split()[0])


def test_notes_and_refusals_are_sentences() -> None:
    for row in FOREIGN:
        assert row.text.endswith(".") is (row.kind is not Kind.IGNORED), row.name
