"""Nothing that a checkpoint is made of can run code when it is read."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.runs import train_tiny, write_corpus
from tests.test_structure import modules

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def calls(tree: ast.AST) -> list[tuple[str, dict[str, object]]]:
    """Every call of a name or an attribute: its dotted name, and the keyword arguments that are constants."""
    return [
        (
            ast.unparse(node.func),
            {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)},
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_nothing_reads_or_writes_pickles():
    """But the converters: they read those of others without running anything, and one file of theirs writes them, for
    who asks for it."""
    for name, path in modules():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {word.split(".")[0] for word in names} & PICKLES or name.startswith("convert."), name
        for function, keywords in calls(tree):
            if function == "torch.load":
                assert name.startswith("convert.") and keywords.get("weights_only") is True, f"{name}: {function}"
            assert function != "torch.save" or name == "convert.torch_file", f"{name}: {function}"
            assert keywords.get("allow_pickle") is not True, f"{name}: {function}"


def test_the_search_finds_what_it_looks_for():
    found = calls(ast.parse("torch.load(path, weights_only=False); np.load(path, allow_pickle=True)"))
    assert found == [("torch.load", {"weights_only": False}), ("np.load", {"allow_pickle": True})]


ALONE = """
import json, sys
sys.modules["trimegatron"] = None  # an import of it fails
from pathlib import Path
from safetensors.torch import load_file
folder = Path(sys.argv[1])
for path in folder.rglob("*.json"):
    json.loads(path.read_text())
shards = [load_file(path) for path in folder.glob("*.safetensors")]
tensors = {name: list(tensor.shape) for shard in shards for name, tensor in shard.items()}
print(json.dumps([tensors, sorted({path.suffix for path in folder.rglob("*") if path.is_file()})]))
"""


def test_files_are_read_without_this_package(tmp_path: Path):
    write_corpus(tmp_path / "text")
    train_tiny(
        tmp_path / "text", metrics=tmp_path / "m.jsonl", save=tmp_path / "c", save_interval=1, train_iters=1, bf16=True,
        world_size=2, use_distributed_optimizer=True,
    )  # fmt: skip
    folder = tmp_path / "c" / "iter_0000001"
    command = [sys.executable, "-I", "-c", ALONE, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    tensors, kinds = json.loads(result.stdout)
    assert kinds == [".json", ".safetensors"]
    assert {"model.final_layernorm.weight", "optimizer.master.final_layernorm.weight"} <= tensors.keys()
