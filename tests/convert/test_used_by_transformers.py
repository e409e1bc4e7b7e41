"""The written model in the hands of transformers and accelerate: same text, same logits, no network."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch

from tests.convert.models import random_source, with_tensor
from trimegatron.convert.from_hf import read_hf
from trimegatron.convert.proof import build_model
from trimegatron.convert.source import Source, read_checkpoint
from trimegatron.convert.to_hf import write_hf
from trimegatron.convert.to_ours import write_checkpoint
from trimegatron.convert.vocabulary import VocabularyConfig
from trimegatron.generate import GenerateConfig, generate, load_model

WORDS = "embedding.word_embeddings.weight"
PROMPT = [3, 5, 7, 8]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something reaches for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def our_text(source: Source, folder: Path) -> list[int]:
    """What the checkpoint in ``folder``, written here, goes on with."""
    write_checkpoint(source, folder, verify=False)
    written = read_checkpoint(folder)
    config = GenerateConfig(load=str(folder), max_new_tokens=12)
    return list(generate(load_model(written.where, device=torch.device("cpu")), written.tokenizer, PROMPT, config))


def test_greedy_text_ends_alike(tmp_path: Path):
    """A word of the text becomes the end token by an exchange of rows: both stop there, where both went on before."""
    from transformers import AutoModelForCausalLM

    source = random_source(with_optimizer=False)
    text = our_text(source, tmp_path / "a")
    place = next(i for i in range(2, 12) if text[i] not in text[:i] + PROMPT)
    words = source.model[WORDS].load().clone()
    words[[text[place], 1002]] = words[[1002, text[place]]]
    ending = with_tensor(source, WORDS, words)
    assert len(text) == 12 and our_text(ending, tmp_path / "b") == text[:place]
    for model, expected in ((source, text), (ending, [*text[:place], 1002])):
        folder = tmp_path / str(len(expected))
        write_hf(model, folder, verify=False)
        theirs = AutoModelForCausalLM.from_pretrained(folder).generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12
        )
        assert theirs[0].tolist() == PROMPT + expected


def test_device_map_with_offload(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """On the CPU, and partly on the disk: the same logits, the head tied, nothing newly initialized."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate, which is not installed")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    source = random_source(with_optimizer=False)
    write_hf(source, tmp_path / "hf", verify=False, max_shard_bytes=50_000)
    tokens = torch.randint(1003, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = build_model(source)(tokens).transpose(0, 1)[..., :1003]
    modules = dict.fromkeys(("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"), "cpu")
    maps: list[str | dict[str, str]] = ["auto", modules | {"transformer.h.0": "cpu", "transformer.h.1": "disk"}]
    transformers_logging.enable_propagation()
    with caplog.at_level(logging.INFO):
        for device_map in maps:
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path / "hf", device_map=device_map, offload_folder=tmp_path / "offload", dtype=torch.float32
            )
            assert model.lm_head.weight is model.transformer.wte.weight
            with torch.no_grad():
                torch.testing.assert_close(model(tokens).logits, ours, atol=1e-4, rtol=0)
    transformers_logging.disable_propagation()
    assert "newly initialized" not in caplog.text and "MISSING" not in caplog.text
    assert model.hf_device_map["transformer.h.1"] == "disk"


def test_bin_with_everything_on_the_disk(tmp_path: Path):
    """The tied head too, which accelerate looks for under its own name; in shards, which the index agrees with."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate, which is not installed")
    from transformers import AutoModelForCausalLM

    source = random_source(with_optimizer=False)
    write_hf(source, tmp_path / "hf", verify=False, format="bin", max_shard_bytes=50_000)
    assert read_hf(tmp_path / "hf", VocabularyConfig(true_vocab_size=1003)).model.keys() == source.model.keys()
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", device_map="auto", max_memory={"cpu": "1KB"}, offload_folder=tmp_path / "offload"
    )
    assert set(model.hf_device_map.values()) == {"disk"}
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        ours = build_model(source)(tokens).transpose(0, 1)[..., :1003]
        torch.testing.assert_close(model(tokens).logits, ours, atol=1e-4, rtol=0)
