"""GPT-2 models of Hugging Face's: as transformers itself saves them, and those that are none of ours."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.models import random_source
from trimegatron.cli import main
from trimegatron.convert.from_hf import read_hf
from trimegatron.convert.source import read_checkpoint
from trimegatron.convert.to_hf import write_hf
from trimegatron.convert.vocabulary import VocabularyConfig
from trimegatron.errors import ConfigError

SMALL = {"vocab_size": 61, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3, "layer_norm_epsilon": 1e-6}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of a model of its own, with noise in every tensor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SMALL, activation_function="gelu", bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return folder


def test_a_model_of_transformers_is_proven(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    flags = ["--model", str(theirs), "--save", str(tmp_path / "ours"), "--true-vocab-size", "60"]
    assert main(["convert", "from-hf", *flags]) == 0
    out, err = capsys.readouterr()
    assert "names 0 as eos_token_id and the tokenizer " in err
    assert "--finetune" in out and re.search(r"proof: max \|Δlogit\| .* agreement 100\.00% over 24 tokens", out)
    source = read_checkpoint(tmp_path / "ours")
    model = source.config.model
    assert (model.vocab_size, model.ffn_hidden_size, model.bias_gelu_fusion) == (60, 96, False)
    whole = load_file(theirs / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(source.model["embedding.word_embeddings.weight"].load(), whole[:60])


def test_old_files(theirs: Path, tmp_path: Path):
    """A pytorch_model.bin of either of torch.save's formats, with the masks, the head and the names of its years."""
    tensors = load_file(theirs / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12, dtype=torch.uint8) for i in range(2)}
    old |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    old["lm_head.weight"] = old["wte.weight"]
    expected = read_hf(theirs, VocabularyConfig(true_vocab_size=61)).model
    for zipped in (True, False):
        folder = tmp_path / str(zipped)
        folder.mkdir()
        shutil.copy(theirs / "config.json", folder)
        torch.save(old, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        found = read_hf(folder, VocabularyConfig(true_vocab_size=61)).model
        for name, tensor in expected.items():
            assert torch.equal(found[name].load(), tensor.load()), name


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_that_older_versions_stored(dtype: torch.dtype, theirs: Path, tmp_path: Path):
    """They are no weights: neither the reading nor the proof stumbles over them."""
    shutil.copytree(theirs, tmp_path / "hf")
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 12, 12, dtype=dtype) for i in range(2)}
    masks |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    set_tensors(lambda tensors: tensors.update(masks))(tmp_path / "hf")
    flags = ["--model", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--true-vocab-size", "61"]
    assert main(["convert", "from-hf", *flags]) == 0


def set_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def set_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def shard(folder: Path) -> None:
    """In shards by an index, of which one is missing."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = list(load_file(folder / "model-00001-of-00002.safetensors"))
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors") | {
        names[0]: "model-00002-of-00002.safetensors"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def evil_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def evil_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": eval}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (set_config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
        (set_config(reorder_and_upcast_attn=True), "reorder_and_upcast_attn is True"),
        (set_config(activation_function="relu"), "activation_function is 'relu' and must be one of gelu_new"),
        (set_config(tie_word_embeddings=False), "tie_word_embeddings is False"),
        (set_config(model_type="llama"), "is a 'llama' model; only the GPT-2 family"),
        (set_config(n_head=5), "num-attention-heads"),
        (set_config(n_inner=100), r"dense_h_to_4h\.bias is \[96\] and must be \[100\]"),
        (set_config(resid_pdrop=0.3), "resid_pdrop and embd_pdrop differ"),
        (set_config(n_layer=3), r"missing from the source is what becomes: layers\.2\."),
        (set_config(n_layer=1), r"no place in the target: transformer\.h\.1\."),
        (set_tensors(lambda t: t.pop("transformer.h.0.ln_1.bias")), r"becomes: layers\.0\.input_layernorm\.bias"),
        (set_tensors(lambda t: t.update({"lm_head.weight": torch.zeros(61, 24)})), "lm_head.weight is not the word"),
        (set_tensors(lambda t: t.update({"score.weight": torch.zeros(1)})), r"no place .*: transformer\.score\.weight"),
        (set_tensors(lambda t: t.update({"x": torch.zeros(1, dtype=torch.int8)})), "x is I8"),
        (
            set_tensors(lambda t: t.update({"transformer.ln_f.bias": t["transformer.ln_f.bias"].half()})),
            "mixes torch.float16, torch.float32",
        ),
        (truncate, r"model\.safetensors is not a safetensors file"),
        (shard, r"model-00002-of-00002\.safetensors is not a safetensors file"),
        (evil_index, r"names the file \.\./x\.safetensors, which is not in the folder"),
        (evil_pickle, "asks for .*eval"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds none of model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json cannot be read"),
    ],
)
def test_what_is_none_of_ours_is_refused(
    damage: Callable[[Path], Any], said: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """Named, exit code 4, nothing left behind."""
    shutil.copytree(theirs, tmp_path / "hf")
    damage(tmp_path / "hf")
    flags = ["--model", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--true-vocab-size", "61"]
    assert main(["convert", "from-hf", *flags]) == 4
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1, error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_tokenizer_decides_the_vocabulary(tmp_path: Path):
    """More rows than words are left out on request only; fewer are an error."""
    write_hf(random_source(with_optimizer=False), tmp_path / "hf", verify=False)
    assert read_hf(tmp_path / "hf").config.model.vocab_size == 1003
    config = tmp_path / "hf" / "tokenizer_config.json"
    for words, message in (
        (999, "1003 words and its tokenizer 1000.*or --true-vocab-size 1000"),
        (1009, "tokenizer 1010"),
    ):
        config.write_text(json.dumps({"tokenizer_class": "NullTokenizer", "vocab_size": words}))
        with pytest.raises(ConfigError, match=message):
            read_hf(tmp_path / "hf")
    config.write_text(json.dumps({"tokenizer_class": "NullTokenizer", "vocab_size": 999}))
    assert read_hf(tmp_path / "hf", VocabularyConfig(true_vocab_size=1000)).config.model.vocab_size == 1000
