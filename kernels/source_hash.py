"""A hash of a kernel's own source: what a timing is a timing of.

It covers the kernel, the device functions it calls and the constants they use, in whichever file of this folder they
are; not comments, docstrings or the order of definitions. Read as text, so neither Triton nor a GPU is needed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent
_PACKAGE = "trimegatron.kernels"
_Definitions = dict[str, ast.stmt | tuple[str, str]]


@functools.cache
def _definitions(module: str) -> _Definitions:
    """What the names at the top level of a file stand for: a definition, or the (file, name) it is imported from, the
    name empty where it is the file itself."""
    found: _Definitions = {}
    for node in ast.parse((_FOLDER / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if ast.get_docstring(node) is not None:
                del node.body[0]
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found |= dict.fromkeys(names, node)
        elif isinstance(node, ast.ImportFrom) and node.module == _PACKAGE:
            found |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_PACKAGE}."):
            file = (node.module or "").rpartition(".")[2]
            found |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return found


@functools.cache
def source_hash(module: str, kernel: str) -> str:
    """16 hexadecimal digits for ``kernel`` of ``kernels/<module>.py``."""
    texts: dict[tuple[str, str], str] = {}

    def visit(module: str, name: str) -> None:
        found = _definitions(module).get(name)
        if isinstance(found, tuple):
            visit(*found)
        elif found is not None and (module, name) not in texts:
            texts[module, name] = ast.unparse(found)
            for node in ast.walk(found):
                if isinstance(node, ast.Name):
                    visit(module, node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    file = _definitions(module).get(node.value.id)
                    if isinstance(file, tuple) and not file[1]:
                        visit(file[0], node.attr)

    visit(module, kernel)
    assert texts, f"kernels/{module}.py has no {kernel}"
    return hashlib.sha256("\n".join(texts[place] for place in sorted(texts)).encode()).hexdigest()[:16]
