"""The machinery: dataclass fields to command line, YAML and help."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimegatron.config.flags import COMMAND_LINE, build, parse, read_options
from trimegatron.config.options import REQUIRED, Options, option
from trimegatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Options):
    """Sizes

    Of everything."""

    hidden_size: int = option(REQUIRED, "width", unit="features", minimum=1)
    head_size: int | None = option(None, "of one head", derived="hidden-size / 4")
    rate: float = option(0.5, "speed, 50 % of the most", flags=("--speed",))
    offset: float = option(0.0, "from the origin", negative=True)
    shape: str = option("round", "outline", choices=("round", "square"))


@dataclass(frozen=True, kw_only=True)
class SwitchConfig(Options):
    """Switches"""

    fast: bool = option(False, "do it fast")
    fusion: bool = option(True, "do it in parts", flags=("--no-joining",))
    no_save: bool = option(False, "keep nothing")
    paths: list[str] = option([], "files", nargs="*")
    counts: list[int] | None = option(None, "numbers")
    target: Path | None = option(None, "where to")


def read(line: str) -> tuple[SizeConfig, SwitchConfig]:
    sizes, switches = parse(line.split(), SizeConfig, SwitchConfig, prog="prog", description="Does it.")
    return sizes, switches


def refused(line: str) -> str:
    with pytest.raises(ConfigError) as raised:
        read(line)
    return str(raised.value)


def test_defaults_and_types() -> None:
    sizes, switches = read("--hidden-size 8")
    assert sizes == SizeConfig(hidden_size=8, head_size=None, rate=0.5, offset=0.0, shape="round")
    assert switches == SwitchConfig(fast=False, fusion=True, no_save=False, paths=[], counts=None, target=None)
    sizes, switches = read("--hidden-size=8 --rate 2 --shape square --paths a b --counts 1 2 --target x/y")
    assert (sizes.rate, type(sizes.rate), sizes.shape) == (2.0, float, "square")
    assert (switches.paths, switches.counts, switches.target) == (["a", "b"], [1, 2], Path("x/y"))
    assert read("--hidden-size 8")[1].paths is not read("--hidden-size 8")[1].paths


@pytest.mark.parametrize("line", ["--hidden_size 8 --speed 3", "--hidden-size 8 --rate=3", "--hidden_size=8 --rate 3"])
def test_spellings(line: str) -> None:
    assert read(line)[0] == SizeConfig(hidden_size=8, rate=3.0)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--fast", "fast", True),
        ("--no-fast", "fast", False),
        ("--no-fusion", "fusion", False),
        ("--no_fusion", "fusion", False),
        ("--no-joining", "fusion", False),
        ("--no-fusion --fusion", "fusion", True),
        ("--no-save", "no_save", True),
        ("--no-save --save", "no_save", False),
    ],
)
def test_switches(line: str, name: str, value: bool) -> None:
    assert getattr(read("--hidden-size 8 " + line)[1], name) is value


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["--hidden-size is required: width"]),
        ("--hidden-size 8 --hidden 4", ["Unknown option --hidden", "Did you mean --hidden-size?"]),
        ("--hidden-size 8 --hiden_size 4", ["Unknown option --hiden_size", "Did you mean --hidden-size"]),
        ("--hidden-size 8 --zzz", ["Unknown option --zzz", "See prog --help"]),
        ("--hidden-size 8 stray", ["Unexpected argument 'stray'"]),
        ("--hidden-size 8 --fast yes", ["Unexpected argument 'yes'"]),
        ("--hidden-size 8 --fast=yes", ["--fast: takes no value, got 'yes'"]),
        ("--hidden-size", ["--hidden-size: expected one argument"]),
        ("--hidden-size 8.5", ["--hidden-size (8.5) must be a whole number"]),
        ("--hidden-size 0", ["--hidden-size (0) must be at least 1"]),
        ("--hidden-size -8", ["--hidden-size (-8) must be at least 1"]),
        ("--hidden-size 8 --rate -1e-4", ["--rate (-0.0001) must not be negative"]),
        ("--hidden-size 8 --rate nan", ["--rate (nan) must be a finite number"]),
        ("--hidden-size 8 --rate x", ["--rate (x) must be a number"]),
        ("--hidden-size 8 --shape flat", ["--shape (flat) must be one of round, square"]),
        ("--hidden-size 8 --shape=", ["--shape", "must not be empty"]),
        ("--hidden-size 8 --counts 1 two", ["--counts (two) must be a whole number"]),
    ],
)
def test_refusals(line: str, parts: list[str]) -> None:
    message = refused(line)
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_negative_values_where_allowed() -> None:
    assert read("--hidden-size 8 --offset -1e-4")[0].offset == -1e-4


def test_the_dataclass_checks_itself() -> None:
    with pytest.raises(ConfigError, match=r"--rate \(-1\) must not be negative"):
        SizeConfig(hidden_size=8, rate=-1)


def test_build() -> None:
    assert build(SizeConfig, {"hidden_size": "8", "rate": 1}) == SizeConfig(hidden_size=8, rate=1.0)
    with pytest.raises(ConfigError, match=r"Unknown option 'hidden_sise' of size\. Did you mean 'hidden_size'"):
        build(SizeConfig, {"hidden_sise": 8})
    with pytest.raises(ConfigError, match=r"--hidden-size \(True\) must be a whole number"):
        build(SizeConfig, {"hidden_size": True})


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        read("--help")
    assert exited.value.code == 0
    text = capsys.readouterr().out
    for part in (
        "usage: prog [OPTIONS]",
        "Sizes:\n  Of everything.",
        "width [features] (required)",
        "(default: hidden-size / 4)",
        "speed, 50 % of the most (default: 0.5)",
        "--shape {round,square}",
        "--no-fusion",
        "--no-save ",
    ):
        assert part in text
    for part in ("--no-fast", "--hidden_size", " --fusion"):
        assert part not in text


# --config


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_file_under_every_spelling(tmp_path: Path) -> None:
    flat = write(tmp_path, "hidden-size: 8\nrate: 6e-4\nno-fusion: true\npaths: one\ncounts: [1, 2]\nno_save: true\n")
    assert read(f"--config {flat}") == (
        SizeConfig(hidden_size=8, rate=6e-4),
        SwitchConfig(fusion=False, paths=["one"], counts=[1, 2], no_save=True),
    )
    grouped = write(tmp_path, "size:\n  hidden_size: 8\n  speed: 2\nswitch: {fusion: false}\n")
    assert read(f"--config {grouped}") == (SizeConfig(hidden_size=8, rate=2.0), SwitchConfig(fusion=False))


def test_command_line_wins_over_file_and_sources_are_known(tmp_path: Path) -> None:
    path = write(tmp_path, "hidden-size: 8\nrate: 2\nfast: true\n")
    sizes, switches = read(f"--rate 3 --no-fast --config {path}")
    assert (sizes.hidden_size, sizes.rate, switches.fast) == (8, 3.0, False)
    given = read_options(
        ["--rate", "3", "--config", path], [SizeConfig, SwitchConfig], prog="prog", description="Does it."
    )
    assert given.values == {"hidden_size": 8, "rate": 3.0, "fast": True}
    assert given.sources == {"hidden_size": path, "rate": COMMAND_LINE, "fast": path}


def test_a_later_file_wins(tmp_path: Path) -> None:
    first = write(tmp_path, "hidden-size: 8\nrate: 2\n")
    second = tmp_path / "second.yaml"
    second.write_text("rate: 4\n")
    sizes, _ = read(f"--config {first} --config {second}")
    assert (sizes.hidden_size, sizes.rate) == (8, 4.0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hidden-sise: 8", "unknown option 'hidden-sise'. Did you mean --hidden-size?"),
        ("switch: {hidden-size: 8}", "'hidden-size' is not an option of 'switch'. Put it under 'size'"),
        ("hidden-size: 8\nhidden_size: 9", "'hidden_size' is given twice"),
        ("hidden-size: 8\nhidden-size: 9", "line 2: not valid YAML: 'hidden-size' is given twice"),
        ("hidden-size: true", "--hidden-size (True) must be a whole number"),
        ("hidden-size: 8.0", "--hidden-size (8.0) must be a whole number"),
        ("fast: 'yes'", "--fast (yes) must be true or false"),
        ("rate: null", "--rate (null) must be a number"),
        ("shape: [round]", "must be text"),
        ("a: [", "line 2: not valid YAML"),
        ("- 8", "must hold 'name: value' lines; got list"),
        ("x: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_file_refusals(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text + "\n")
    message = refused(f"--config {path}")
    assert part in message
    assert message.startswith(path)


def test_missing_file(tmp_path: Path) -> None:
    assert "--config (nothing.yaml) cannot be read: No such file" in refused("--config nothing.yaml")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, trimegatron.config; "
        "print([name for name in ('torch', 'triton', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
