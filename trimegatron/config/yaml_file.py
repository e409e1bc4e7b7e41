"""Read a YAML mapping without surprises: no objects, no key twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trimegatron.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML itself lets the last of two equal keys win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[Any, Any]:
    """The top-level mapping of a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config ({path}) cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config ({path}) is not UTF-8 text.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold 'name: value' lines; got {type(content).__name__}.")
    return content
