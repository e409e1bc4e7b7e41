"""A checkpoint of any tensor-parallel size becomes the same Hugging Face model, with our logits."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runs import VOCAB_SIZE, train_tiny, write_corpus
from trimegatron.cli import main
from trimegatron.convert.proof import logits_in_a_fresh_process
from trimegatron.convert.to_hf import convert_to_hf
from trimegatron.errors import CheckpointError
from trimegatron.generate import load_model


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(prefix)
    return prefix


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps at tp=2."""
    folder = tmp_path_factory.mktemp("trained")
    train_tiny(
        corpus, metrics=folder / "m.jsonl", save=folder / "tp2", save_interval=100, train_iters=6,
        world_size=2, tensor_model_parallel_size=2, layernorm_epsilon=1e-6,
    )  # fmt: skip
    return folder / "tp2"


def test_tp1_and_tp2_of_the_same_weights_give_the_same_files(trained: Path, corpus: Path, tmp_path: Path):
    """The tp=2 checkpoint is loaded at tp=1 with its step count at the end, so that a run only saves it again."""
    train_tiny(
        corpus, metrics=tmp_path / "m.jsonl", load=trained, save=tmp_path / "tp1", save_interval=100, train_iters=6,
        layernorm_epsilon=1e-6,
    )  # fmt: skip
    for name, source in (("a", trained), ("b", tmp_path / "tp1")):
        proof = convert_to_hf(source, tmp_path / name)
        assert proof is not None and proof.max_difference < 1e-4 and proof.greedy_agreement == 1.0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", files, shallow=False)[0] == files


def test_configuration_comes_from_the_run(trained: Path, tmp_path: Path):
    assert main(["convert", "to-hf", "--load", str(trained), "--output", str(tmp_path / "hf")]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE and config["eos_token_id"] == VOCAB_SIZE - 1
    assert config["layer_norm_epsilon"] == 1e-6 and config["activation_function"] == "gelu_new"
    assert (config["n_layer"], config["n_embd"], config["n_head"], config["n_positions"]) == (2, 32, 4, 16)
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    assert not list(tmp_path.glob(".*"))


def test_logits_agree_on_any_tokens(trained: Path, tmp_path: Path):
    convert_to_hf(trained, tmp_path / "hf", verify=False)
    tokens = torch.randint(VOCAB_SIZE, (3, 16))
    theirs = logits_in_a_fresh_process(tmp_path / "hf", tokens)
    source = next(trained.glob("iter_*"))
    with torch.no_grad():
        ours = load_model(source, device=torch.device("cpu"))(tokens).transpose(0, 1)[..., :VOCAB_SIZE]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_wrong_conversion_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Queries, keys and values left in our order: fluent nonsense, which the proof must catch."""
    monkeypatch.setattr("trimegatron.convert.gpt2.rearrange", lambda tensor, *_, **__: tensor)
    with pytest.raises(CheckpointError, match="is not the checkpoint's"):
        convert_to_hf(trained, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_foreign_or_missing_tensor_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from trimegatron.convert import to_hf

    read = to_hf.read_whole
    monkeypatch.setattr(to_hf, "read_whole", lambda *a: [*read(*a), ("model.layers.0.rotary.weight", torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"no place for the parameter layers\.0\.rotary\.weight"):
        convert_to_hf(trained, tmp_path / "hf")
    monkeypatch.setattr(to_hf, "read_whole", lambda *a: list(read(*a))[:-1])
    with pytest.raises(CheckpointError, match="lacks what becomes transformer"):
        convert_to_hf(trained, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_dtype(trained: Path, tmp_path: Path):
    proof = convert_to_hf(trained, tmp_path / "hf", dtype="bfloat16")
    assert proof is not None and proof.holds
    assert {tensor.dtype for tensor in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


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
    import shutil

    shutil.copytree(trained, tmp_path / "c")
    shard = next((tmp_path / "c").rglob("shard-00001.safetensors"))
    size = shard.stat().st_size
    save_file({"x": torch.zeros(1)}, shard)
    shard.write_bytes(shard.read_bytes().ljust(size, b"\0"))
    assert main(["convert", "to-hf", "--load", str(tmp_path / "c"), "--output", str(tmp_path / "hf")]) == 4
    assert "shard-00001.safetensors" in capsys.readouterr().err
