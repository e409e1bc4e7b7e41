"""A checkpoint of any tensor-parallel size becomes the same Hugging Face model, with our logits."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.models import random_source, with_tensor, write_layout
from tests.runs import VOCAB_SIZE, train_tiny
from trimegatron.bench.measure import Contender, peak_memory
from trimegatron.cli import main
from trimegatron.convert.to_hf import convert_to_hf, write_hf
from trimegatron.convert.to_ours import write_checkpoint
from trimegatron.errors import CheckpointError


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps at tp=2."""
    folder = tmp_path_factory.mktemp("trained")
    train_tiny(
        corpus, metrics=folder / "m.jsonl", save=folder / "tp2", save_interval=100, train_iters=6,
        world_size=2, tensor_model_parallel_size=2, layernorm_epsilon=1e-6,
    )  # fmt: skip
    return folder / "tp2"


def test_the_command_proves_and_tells(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Several shards, loaded by transformers; the proof is printed and in the card."""
    flags = ["--load", str(trained), "--output", str(tmp_path / "hf"), "--max-shard-size", "60KB"]
    assert main(["convert", "to-hf", *flags]) == 0
    out, err = capsys.readouterr()
    (proof,) = re.findall(r"proof: (max .*)", out)
    assert "greedy agreement 100.00% over 32 tokens" in proof
    found = re.search(r"max \|Δlogit\| (\S+) \(.*loss \S+, difference (\S+)$", proof)
    assert found and float(found[1]) < 1e-4 and float(found[2]) < 1e-5 and err == ""
    card = (tmp_path / "hf" / "README.md").read_text()
    assert proof in card and "`text`" in card and "| samples | 48 of 16 tokens (768 tokens) |" in card
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_source_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    shutil.copytree(trained, tmp_path / "c")
    shard = next((tmp_path / "c").rglob("shard-00001.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["convert", "to-hf", "--load", str(tmp_path / "c"), "--output", str(tmp_path / "hf")]) == 4
    assert "its SHA-256 is not the manifest's" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_configuration_comes_from_the_run(trained: Path, tmp_path: Path):
    flags = ["--load", str(trained), "--output", str(tmp_path / "hf"), "--no-verify"]
    assert main(["convert", "to-hf", *flags]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE and config["eos_token_id"] == VOCAB_SIZE - 1
    assert config["layer_norm_epsilon"] == 1e-6 and config["activation_function"] == "gelu_new"
    assert (config["n_layer"], config["n_embd"], config["n_head"], config["n_positions"]) == (2, 32, 4, 16)
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == VOCAB_SIZE - 1
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert "not verified" in (tmp_path / "hf" / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))


def test_a_wrong_conversion_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Queries, keys and values left in our order: fluent nonsense, which the proof must catch."""
    monkeypatch.setattr("trimegatron.convert.gpt2.rearrange", lambda tensor, *_, **__: tensor)
    with pytest.raises(CheckpointError, match="is not its source"):
        convert_to_hf(trained, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_foreign_or_missing_tensor_is_refused(tmp_path: Path):
    source = random_source(with_optimizer=False)
    with pytest.raises(CheckpointError, match=r"no place in the target: layers\.0\.rotary\.weight"):
        write_hf(with_tensor(source, "layers.0.rotary.weight", torch.zeros(1)), tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"missing from the source is what becomes: transformer\.ln_f\.bias"):
        write_hf(with_tensor(source, "final_layernorm.bias", None), tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_dtype_and_bin(tmp_path: Path):
    """Rounded as asked, in the form asked for; the proof rounds the source alike."""
    source = random_source(with_optimizer=False)
    proof = write_hf(source, tmp_path / "hf", dtype="bfloat16", format="bin")
    assert proof is not None and proof.holds
    tensors = torch.load(tmp_path / "hf" / "pytorch_model.bin", weights_only=True)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16} and len(tensors) == 29
    assert tensors["lm_head.weight"].data_ptr() == tensors["transformer.wte.weight"].data_ptr()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_upload_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    write_checkpoint(random_source(with_optimizer=False), tmp_path / "c", verify=False)
    flags = ["convert", "to-hf", "--load", str(tmp_path / "c"), "--no-verify", "--output"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main([*flags, str(tmp_path / "a")]) == 0
    assert main([*flags, str(tmp_path / "b"), "--push-to-hub", "me/mine"]) == 2
    assert "pip install 'trimegatron[hub]'" in capsys.readouterr().err and not (tmp_path / "b").exists()
    calls: list[tuple] = []

    class HfApi:
        def create_repo(self, *args, **kwargs) -> str:
            calls.append(("create", args, kwargs))
            return "https://hub/me/mine"

        def upload_folder(self, **kwargs) -> None:
            assert (Path(kwargs["folder_path"]) / "model.safetensors").is_file()
            calls.append(("upload", kwargs["repo_id"]))
            if kwargs["repo_id"] == "me/full":
                raise RuntimeError("no space")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=HfApi))
    assert main([*flags, str(tmp_path / "b"), "--push-to-hub", "me/mine"]) == 0
    assert "uploaded to https://hub/me/mine" in capsys.readouterr().out
    assert calls[0][2]["private"] is True and calls[1] == ("upload", "me/mine")
    assert main([*flags, str(tmp_path / "d"), "--push-to-hub", "me/full"]) == 1
    assert "could not be uploaded to me/full: RuntimeError: no space" in capsys.readouterr().err
    assert (tmp_path / "d" / "config.json").is_file()


def test_output_must_be_free(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious").write_text("x")
    assert main(["convert", "to-hf", "--load", str(trained), "--output", str(tmp_path / "hf")]) == 2
    assert "--output" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["precious"]


def test_nothing_to_load(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["convert", "to-hf", "--load", str(tmp_path / "typo"), "--output", str(tmp_path / "hf")]) == 4
    assert "does not exist" in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    shutil.copytree(trained, tmp_path / "c")
    shard = next((tmp_path / "c").rglob("shard-00001.safetensors"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    assert main(["convert", "to-hf", "--load", str(tmp_path / "c"), "--output", str(tmp_path / "hf")]) == 4
    assert "shard-00001.safetensors" in capsys.readouterr().err


def test_options_of_other_sources_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    flags = ["convert", "to-hf", "--load", str(trained), "--output", str(tmp_path / "hf")]
    for more in (["--true-vocab-size", "5"], ["--no-mask-padded-vocab"]):
        assert main([*flags, *more]) == 2
        assert "Leave out the options about tokenizer and vocabulary" in capsys.readouterr().err


def measure(root: str, output: str, max_shard_bytes: int) -> dict[str, float]:
    """For a process of its own: peak memory before and after a conversion without proof, in MB."""
    from trimegatron.convert.source import read_checkpoint

    before = peak_memory()["peak_mb"]
    write_hf(read_checkpoint(Path(root)), Path(output), verify=False, max_shard_bytes=max_shard_bytes)
    return {"before": before, "after": peak_memory()["peak_mb"]}


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """131 MB of weights in shards of 20 MB: nothing near the whole is ever held."""
    shape = {"hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8, "num_layers": 10}
    source = random_source(with_optimizer=False, **shape)
    write_layout(source, tmp_path / "c", tp=2, pp=1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    arguments = {"root": str(tmp_path / "c"), "output": str(tmp_path / "hf"), "max_shard_bytes": 20_000_000}
    figures = Contender(f"{__name__}:measure", arguments).run()
    shards = [path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors")]
    assert sum(shards) > 125e6 and max(shards) < 21e6
    assert figures["after"] - figures["before"] < 60
