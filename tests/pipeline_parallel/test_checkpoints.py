"""A checkpoint of any pipeline is loaded by any other layout, converted, and generated from."""

from __future__ import annotations

import filecmp
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.pipelining  # (here once, not in each forked rank)
from safetensors import safe_open

from tests.checkpoint.test_resume import assert_equal_checkpoints, without_timing
from tests.runs import VOCAB_SIZE, train_each
from trimegatron.checkpoint.directory import require_checkpoint
from trimegatron.convert.to_hf import convert_to_hf
from trimegatron.generate import GenerateConfig, generate, load_model
from trimegatron.tokenizer import NullTokenizer

COMMON = {"num_layers": 4, "save_interval": 100}
PP2 = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}


@pytest.fixture(scope="module")
def relay(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps at (pp2, two stages on each rank), four on one process, four at (pp2, tp2), in the folders a, b, c; on
    the way each checkpoint is loaded and saved once more by another layout. And twelve on one process.
    """
    folder = tmp_path_factory.mktemp("relay")

    def leg(load: str | None, save: str, until: int, **layout: int) -> dict:
        return COMMON | layout | {"load": load and folder / load, "save": folder / save, "train_iters": until}

    first = train_each(
        corpus,
        folder,
        {
            "a": leg(None, "a", 4, **INTERLEAVED),
            "stopped": leg("resumed", "resumed", 4, **INTERLEAVED) | {"exit_interval": 2},
            "resumed": leg("resumed", "resumed", 4, **INTERLEAVED),
        },
        world_size=2,
    )
    second = train_each(
        corpus,
        folder,
        {"straight": COMMON | {"train_iters": 12}, "b": leg("a", "b", 8), "a again": leg("a", "a-1", 4)},
    )
    third = train_each(
        corpus,
        folder,
        {
            "c": leg("b", "c", 12, **PP2, tensor_model_parallel_size=2),
            "b again": leg("b", "b-4", 8, pipeline_model_parallel_size=4),
        },
        world_size=4,
    )
    train_each(corpus, folder, {"c again": leg("c", "c-1", 12)})
    assert without_timing(first["stopped"] + first["resumed"]) == without_timing(first["a"])
    lines = [line for lines in (first["a"], second["b"], third["c"]) for line in lines]
    for name in ("lm_loss", "grad_norm"):
        np.testing.assert_allclose([x[name] for x in lines], [x[name] for x in second["straight"]], rtol=1e-5)
    return folder


def test_every_layout_loads_what_another_saved(relay: Path):
    for one, other in (("a", "resumed"), ("a", "a-1"), ("b", "b-4"), ("c", "c-1")):
        assert_equal_checkpoints(*(require_checkpoint(relay / name) for name in (one, other)))


def test_the_tied_copy_is_not_saved(relay: Path):
    """The word table is in the file of the first stage alone."""
    holds = []
    for shard in sorted(require_checkpoint(relay / "a").glob("shard-*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            holds.append("model.embedding.word_embeddings.weight" in file.keys())  # noqa: SIM118
    assert holds == [True, False]


def test_conversion_and_text(relay: Path, tmp_path: Path):
    """From (pp2, tp2) the same files, and the same text, as from the same weights saved by one process."""
    texts = []
    for name in ("c", "c-1"):
        proof = convert_to_hf(relay / name, tmp_path / name, verify=name == "c")
        assert proof is None or proof.holds
        model = load_model(require_checkpoint(relay / name), device=torch.device("cpu"))
        config = GenerateConfig(load=name, max_new_tokens=12)
        texts.append(list(generate(model, NullTokenizer(VOCAB_SIZE - 1), [3, 5, 7], config)))
    # All but the model card, which names the layout and the proof.
    files = sorted(path.name for path in (tmp_path / "c").iterdir() if path.name != "README.md")
    assert filecmp.cmpfiles(tmp_path / "c", tmp_path / "c-1", files, shallow=False)[0] == files
    assert len(texts[0]) == 12 and texts[0] == texts[1]
