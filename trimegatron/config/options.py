"""How an option is declared: a field of a frozen dataclass with its help, unit and rules.

    @dataclass(frozen=True, kw_only=True)
    class SizeConfig(Options):
        \"\"\"Sizes

        The first line is the heading in --help.\"\"\"

        width: int = option(REQUIRED, "features of one token", minimum=1)
        depth: int = option(None, "number of layers", derived="width / 64", minimum=1)

A field annotated ``int`` whose default is None is *derived*: None only until the dataclass has filled it in, a value
afterwards. A field annotated ``int | None`` may stay None.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trimegatron.errors import ConfigError

REQUIRED: Any = dataclasses.MISSING
"""As a default: there is none, the user must give a value."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What ``option`` knows about a field beside its name, annotation and default."""

    help: str
    flags: tuple[str, ...]
    choices: tuple[Any, ...] | None
    unit: str | None
    negative: bool
    minimum: float | None
    nargs: str | int | None
    derived: str | None
    metavar: str | None
    hidden: bool


def option(
    default: Any,
    help: str,
    *,
    flags: Sequence[str] = (),
    choices: Sequence[Any] | None = None,
    unit: str | None = None,
    negative: bool = False,
    minimum: float | None = None,
    nargs: str | int | None = None,
    derived: str | None = None,
    metavar: str | None = None,
    hidden: bool = False,
) -> Any:
    """Declare a field that is also a command-line option and a key of ``--config`` files.

    Args:
        default: the value when nothing is given; ``REQUIRED`` where there is none. Lists are copied.
        help: one phrase for ``--help``.
        flags: further spellings. Of a boolean, a spelling that starts with ``--no-`` turns it off.
        choices: the values allowed.
        unit: "iterations", "samples", …, shown in the help.
        negative: numbers below 0 are allowed (they are refused otherwise).
        minimum: the smallest number allowed, e.g. 1 for a size.
        nargs: argparse's, for lists; "+" unless given.
        derived: how the value follows from others when it is not given ("4 x hidden-size"), shown in the help.
        metavar: what the help calls the value, e.g. "DIR".
        hidden: leave it out of ``--help``.
    """
    allowed = None if choices is None else tuple(choices)
    declaration = Declaration(help, tuple(flags), allowed, unit, negative, minimum, nargs, derived, metavar, hidden)
    metadata = {"option": declaration}
    if isinstance(default, list | dict | set):
        return dataclasses.field(default_factory=functools.partial(type(default), default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Option:
    """One declared field, with its annotation taken apart."""

    name: str
    declaration: Declaration
    type: type
    """bool, int, float, str or Path: of the value, or of each element of a list."""
    is_list: bool
    optional: bool
    """None is a value of it, also in the end."""
    default: Any

    @property
    def flag(self) -> str:
        """The canonical spelling without a sign: ``--hidden-size``."""
        return kebab(self.name)

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


def show_number(value: float) -> str:
    """``1e-05``, and 4294967296 in full where %g would round it."""
    return f"{value:.12g}"


def kebab(name: str) -> str:
    """``hidden_size`` → ``--hidden-size``."""
    return "--" + name.replace("_", "-")


def fail(name: str, value: object, rule: str, got: str = "", way_out: str = "") -> NoReturn:
    """Raise the one kind of message a wrong option gets: field, value, rule, what it came to, way out."""
    shown = "" if value is None else f" ({value})"
    text = f"{kebab(name)}{shown} {rule}" + (f"; {got}" if got else "") + "."
    raise ConfigError(f"{text} {way_out}".strip())


def options_of(cls: type) -> dict[str, Option]:
    """The declared options of a dataclass, in order, by field name. Fields without ``option`` are left out."""
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if "option" not in field.metadata:
            continue
        value_type, is_list, optional = _take_apart(hints[field.name], f"{cls.__name__}.{field.name}")
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = Option(field.name, field.metadata["option"], value_type, is_list, optional, default)
    return found


def _take_apart(hint: Any, where: str) -> tuple[type, bool, bool]:
    """``list[str] | None`` → (str, True, True)."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        assert len(members) == 1, f"{where}: an option has one type, not {hint}"
        hint = members[0]
    is_list = typing.get_origin(hint) is list
    if is_list:
        (hint,) = typing.get_args(hint)
    assert hint in (bool, int, float, str, Path), f"{where}: cannot make an option of {hint}"
    return hint, is_list, optional


def check_value(option: Option, value: Any) -> None:
    """Choices and bounds of one value. Raises ConfigError."""
    if value is None:
        return
    declared = option.declaration
    for element in value if option.is_list else (value,):
        if declared.choices is not None and element not in declared.choices:
            fail(option.name, element, "must be one of " + ", ".join(str(choice) for choice in declared.choices))
        if option.type not in (int, float):
            continue
        if not math.isfinite(element):
            fail(option.name, element, "must be a finite number")
        if declared.minimum is not None and element < declared.minimum:
            fail(option.name, element, f"must be at least {declared.minimum:g}")
        if element < 0 and not declared.negative:
            fail(option.name, element, "must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of option dataclasses: checks choices and bounds of every field when one is made, however it is made."""

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            check_value(declared, getattr(self, name))

    def _derive(self, **values: Any) -> None:
        """Fill in derived fields; for ``__post_init__`` only."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def missing_options(groups: Sequence[type], values: Mapping[str, Any]) -> list[Option]:
    """Required options of the groups for which there is no value."""
    return [
        declared
        for group in groups
        for declared in options_of(group).values()
        if declared.required and values.get(declared.name) is None
    ]
