"""From dataclasses to the command line and ``--config`` files; ``options.py`` says how an option is declared.

Every subcommand reads its arguments with

    sizes, paths = parse(argv, SizeConfig, PathConfig, prog="trimegatron thing", description="…")

``hidden_size: int`` becomes ``--hidden-size N`` (``--hidden_size`` too). A boolean takes no value: ``--fp16`` where
False is the default, ``--no-bias-gelu-fusion`` where True is; the opposite exists too, so that the command line can
overrule a file. Options are never abbreviated. Every error is a ConfigError with one message.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from trimegatron.config.options import (
    REQUIRED,
    Option,
    Options,
    check_value,
    fail,
    kebab,
    missing_options,
    option,
    options_of,
    show_number,
)
from trimegatron.config.yaml_file import load_mapping
from trimegatron.errors import ConfigError

__all__ = [
    "COMMAND_LINE",
    "REQUIRED",
    "Given",
    "OptionParser",
    "Options",
    "add_options",
    "build",
    "fail",
    "group_name",
    "option",
    "parse",
    "read_options",
    "require",
]

T = TypeVar("T")

COMMAND_LINE = "command line"
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}


@dataclasses.dataclass(frozen=True)
class Given:
    """What the user gave: by field name the value, and where it came from (``COMMAND_LINE`` or the path of a file)."""

    values: dict[str, Any]
    sources: dict[str, str]


class OptionParser(argparse.ArgumentParser):
    """argparse without abbreviations and exits: errors are ConfigErrors. Snake_case spellings are understood."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Help, **settings})
        self.spellings: dict[str, Option] = {}
        """Every spelling in kebab-case → the option it belongs to."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(None if args is None else list(self._normalize(args)), namespace)

    def _normalize(self, argv: Sequence[str]) -> Iterator[str]:
        """Kebab-case for option names, and ``--lr=-1e-4`` for ``--lr -1e-4``, which argparse takes for two options."""
        pending, takes_value = "", False
        for token in argv:
            if takes_value and re.match(r"-[\d.]", token):
                yield f"{pending}={token}"
                takes_value = False
                continue
            if takes_value:
                yield pending
            name, equals, value = token.partition("=")
            declared = self.spellings.get(name.replace("_", "-")) if name.startswith("--") else None
            pending = token if declared is None else name.replace("_", "-") + equals + value
            takes_value = declared is not None and not (equals or declared.is_list or declared.type is bool)
            if not takes_value:
                yield pending
        if takes_value:
            yield pending

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+)[^:]*: ", r"\1: ", message)
        message = message.replace("ignored explicit argument", "takes no value, got")
        raise ConfigError(f"{message}. See {self.prog} --help.")

    def refuse_unknown(self, leftover: Sequence[str]) -> None:
        """Raise for what ``parse_known_args`` left over, with the nearest spellings."""
        for token in leftover:
            name = token.partition("=")[0]
            if not name.startswith("-"):
                continue
            near = self.nearest(name)
            raise ConfigError(f"Unknown option {name}. {near or f'See {self.prog} --help.'}")
        if leftover:
            raise ConfigError(
                f"Unexpected argument {leftover[0]!r}: it belongs to no option. See {self.prog} --help for what takes "
                "values."
            )

    def nearest(self, name: str) -> str:
        """ "Did you mean …?", or nothing."""
        name = "--" + name.lstrip("-").replace("_", "-")
        known = list(self.spellings)
        near = [spelling for spelling in known if len(name) > 4 and spelling.startswith(name)][:3]
        near = near or difflib.get_close_matches(name, known, n=2, cutoff=0.75)
        return f"Did you mean {' or '.join(near)}?" if near else ""


class _Help(argparse.HelpFormatter):
    """Option names are never broken at their hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        """One line: with a hundred options the full usage would say nothing."""
        super().add_usage("%(prog)s [OPTIONS]" if usage is None else usage, actions, groups, prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [textwrap.fill(part, width, break_on_hyphens=False) for part in text.split("\n")]
        return textwrap.indent("\n".join(paragraphs), indent)


def add_options(parser: OptionParser, cls: type) -> None:
    """Add the options of a dataclass to a parser, as a group headed by the first line of its docstring."""
    title, _, description = (cls.__doc__ or cls.__name__).strip().partition("\n")
    group = parser.add_argument_group(title, description.strip() or None)
    for declared in options_of(cls).values():
        spellings = _spellings(declared)
        for spelling in spellings:
            assert parser.spellings.get(spelling) is None, f"{spelling} is declared twice"
            parser.spellings[spelling] = declared
        if declared.type is bool and not declared.is_list:
            _add_switch(group, declared, spellings)
            continue
        choices = declared.declaration.choices
        metavar = declared.declaration.metavar or _METAVARS[declared.type]
        group.add_argument(
            *spellings,
            dest=declared.name,
            nargs=(declared.declaration.nargs or "+") if declared.is_list else None,
            metavar="{" + ",".join(map(str, choices)) + "}" if choices else metavar,
            default=argparse.SUPPRESS,
            help=_help_text(declared),
        )


def _spellings(declared: Option) -> dict[str, bool | None]:
    """Kebab-case spellings of an option → the value a boolean gets, None for others. The canonical one is first."""
    aliases = [alias.replace("_", "-") for alias in declared.declaration.flags]
    if declared.type is not bool or declared.is_list:
        return dict.fromkeys([declared.flag, *aliases])
    negation = declared.name.startswith("no_")  # Megatron's no_save_optim: True when given
    opposite = "--" + declared.flag.removeprefix("--no-") if negation else "--no-" + declared.flag[2:]
    found: dict[str, bool | None] = {declared.flag: True, opposite: False}
    for alias in aliases:
        found.setdefault(alias, negation or not alias.startswith("--no-"))
    # The one that changes the default comes first; it is the one help shows.
    return dict(sorted(found.items(), key=lambda item: item[1] is declared.default))


def spell(cls: type, name: str, value: Any) -> str:
    """What gives a field of a dataclass this value: ``--hidden-size 64``, ``--no-bias-gelu-fusion``."""
    declared = options_of(cls)[name]
    if declared.type is bool:
        return next(spelling for spelling, stored in _spellings(declared).items() if stored is value)
    return f"{declared.flag} {value}"


def _add_switch(group: Any, declared: Option, spellings: Mapping[str, bool | None]) -> None:
    for stored in (True, False):
        names = [spelling for spelling, value in spellings.items() if value is stored]
        group.add_argument(
            *names,
            dest=declared.name,
            action="store_const",
            const=stored,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS if stored is declared.default else _help_text(declared),
        )


def _help_text(declared: Option) -> str:
    """``width of the model [features] (required)``"""
    about = declared.declaration
    if about.hidden:
        return argparse.SUPPRESS
    text = about.help + (f" [{about.unit}]" if about.unit else "")
    if declared.required:
        text += " (required)"
    elif about.derived:
        text += f" (default: {about.derived})"
    elif declared.type is not bool and declared.default not in (None, []):
        default = show_number(declared.default) if isinstance(declared.default, float) else str(declared.default)
        text += f" (default: {default})"
    return text.replace("%", "%%")


def convert(declared: Option, raw: Any) -> Any:
    """Text of the command line, or a value of a YAML file, as the option's type. Raises ConfigError."""
    if raw is None:
        if declared.optional or declared.default is None:
            return None
        fail(declared.name, "null", f"must be {_KINDS[declared.type]}", way_out="Leave it out for the default.")
    if declared.is_list:
        return [_convert_one(declared, element) for element in (raw if isinstance(raw, list | tuple) else [raw])]
    return _convert_one(declared, raw)


def _convert_one(declared: Option, raw: Any) -> Any:
    kind = declared.type
    try:
        if kind is bool:
            if not isinstance(raw, bool):
                raise ValueError
            return raw
        if isinstance(raw, bool) or not isinstance(raw, int | float | str | Path):
            raise ValueError
        if kind is int and isinstance(raw, float):
            raise ValueError
        if raw == "":
            fail(declared.name, '""', "must not be empty", way_out="Give a value or leave the option out.")
        return kind(raw)
    except ValueError:
        fail(declared.name, raw, f"must be {_KINDS[kind]}")


def read_options(
    argv: Sequence[str],
    groups: Sequence[type],
    *,
    prog: str,
    description: str,
    epilog: str | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Given:
    """What ``argv`` and the ``--config`` files in it give for the options of ``groups``; defaults are not filled in.
    ``presets`` are options under a name that ``--config`` takes like a file.

    ``--help`` prints and raises SystemExit(0), as argparse does.
    """
    presets = presets or {}
    parser = OptionParser(prog=prog, description=description, epilog=epilog)
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        action="append",
        default=[],
        help="read options from a YAML file, under the same names; the command line wins, a later file wins too"
        + (f". One of these names is a file that is here already: {', '.join(presets)}" if presets else ""),
    )
    for group in groups:
        add_options(parser, group)
    namespace, leftover = parser.parse_known_args(argv)
    parser.refuse_unknown(leftover)
    raw = vars(namespace)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for path in raw.pop("config"):
        if presets and path not in presets and not Path(path).exists():
            fail("config", path, f"must be a YAML file or one of {', '.join(presets)}")
        content = presets[path] if path in presets else load_mapping(Path(path))
        for name, value in _read_mapping(content, path, groups, parser).items():
            values[name], sources[name] = value, path
    declared = {name: found for group in groups for name, found in options_of(group).items()}
    for name, value in raw.items():
        values[name], sources[name] = convert(declared[name], value), COMMAND_LINE
    return Given(values, sources)


def _read_mapping(
    content: Mapping[Any, Any], path: str, groups: Sequence[type], parser: OptionParser
) -> dict[str, Any]:
    """Options of the YAML file ``path``, flat (``lr: 1e-3``) or under the name of their group (``optimizer:
    {lr: 1e-3}``).
    """
    members = {group_name(group): options_of(group) for group in groups}
    found: dict[str, Any] = {}

    def take(key: object, value: Any, inside: str | None) -> None:
        spelling = kebab(str(key))
        declared = parser.spellings.get(spelling)
        if declared is None:
            raise ConfigError(f"{path}: unknown option {key!r}. {parser.nearest(spelling)}".rstrip())
        if inside is not None and declared.name not in members[inside]:
            owner = next(name for name, options in members.items() if declared.name in options)
            raise ConfigError(f"{path}: {key!r} is not an option of {inside!r}. Put it under {owner!r} or no group.")
        if declared.name in found:
            raise ConfigError(f"{path}: {key!r} is given twice, in two spellings. Keep one.")
        try:
            value = convert(declared, value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        found[declared.name] = not value if _spellings(declared).get(spelling) is False else value

    for key, value in content.items():
        if isinstance(value, dict) and str(key) in members:
            for inner, inner_value in value.items():
                take(inner, inner_value, str(key))
        else:
            take(key, value, None)
    return found


def group_name(cls: type) -> str:
    """``OptimizerConfig`` → ``optimizer``."""
    return cls.__name__.removesuffix("Config").lower()


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make the dataclass from values by field name, converted and checked; fields left out take their defaults.

    Raises:
        ConfigError: unknown names, required ones left out, values of the wrong type or out of bounds.
    """
    options = options_of(cls)
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = [name for name in values if name not in fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        raise ConfigError(
            f"Unknown option {unknown[0]!r} of {group_name(cls)}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    require([cls], values)
    converted = {name: convert(options[name], value) if name in options else value for name, value in values.items()}
    for name, value in converted.items():
        if name in options:
            check_value(options[name], value)
    return cls(**converted)


def require(groups: Sequence[type], values: Mapping[str, Any], *, prog: str = "") -> None:
    """Raise ConfigError naming every required option of the groups that has no value."""
    missing = missing_options(groups, values)
    if missing:
        names = ", ".join(declared.flag for declared in missing)
        verb = "is" if len(missing) == 1 else "are"
        about = f": {missing[0].declaration.help}" if len(missing) == 1 else ""
        raise ConfigError(f"{names} {verb} required{about}." + (f" See {prog} --help." if prog else ""))


def parse(
    argv: Sequence[str],
    *groups: type,
    prog: str,
    description: str,
    epilog: str | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Any, ...]:
    """Read ``argv`` (and its ``--config`` files or ``presets``) into one instance of each group. Raises ConfigError."""
    given = read_options(argv, groups, prog=prog, description=description, epilog=epilog, presets=presets)
    require(groups, given.values, prog=prog)
    return tuple(
        build(group, {name: given.values[name] for name in options_of(group) if name in given.values})
        for group in groups
    )
