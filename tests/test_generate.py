"""Text from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs import VOCAB_SIZE, train_tiny, write_corpus
from trimegatron.checkpoint.directory import require_checkpoint
from trimegatron.cli import main
from trimegatron.convert.proof import logits_in_a_fresh_process
from trimegatron.convert.to_hf import convert_to_hf
from trimegatron.generate import GenerateConfig, generate, load_model, pick
from trimegatron.tokenizer import NullTokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder / "text")
    train_tiny(
        folder / "text", metrics=folder / "m.jsonl", save=folder / "c", save_interval=20,
        world_size=2, tensor_model_parallel_size=2,
    )  # fmt: skip
    return folder / "c"


def greedy(trained: Path, prompt: list[int], count: int) -> list[int]:
    model = load_model(require_checkpoint(trained), device=torch.device("cpu"))
    config = GenerateConfig(load=str(trained), max_new_tokens=count)
    return list(generate(model, NullTokenizer(VOCAB_SIZE - 1), prompt, config))


def test_greedy_text_is_the_exported_models(trained: Path, tmp_path: Path):
    """One forward pass of the exported model over prompt and text predicts each token of the text."""
    prompt = [3, 5, 7, 8]
    text = greedy(trained, prompt, 12)
    convert_to_hf(trained, tmp_path / "hf")
    logits = logits_in_a_fresh_process(tmp_path / "hf", torch.tensor([prompt + text]))
    predicted = logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert len(text) == 12 and predicted == text


def test_it_goes_on_beyond_the_position_table(trained: Path):
    assert len(greedy(trained, [1, 2, 3], 30)) == 30  # 16 positions


def test_the_command(trained: Path, capsys: pytest.CaptureFixture):
    flags = ["generate", "--load", str(trained), "--prompt", "3 5 7 8", "--max-new-tokens", "5"]
    assert main(flags) == 0
    expected = [3, 5, 7, 8, *greedy(trained, [3, 5, 7, 8], 5)]
    assert capsys.readouterr().out.split() == [str(token) for token in expected]
    sampled = [*flags, "--temperature", "1.0", "--top-k", "5"]
    outs = []
    for seed in ("1", "1", "2"):
        assert main([*sampled, "--seed", seed]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


def test_it_stops_at_the_end_token(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trimegatron.generate.pick", lambda *_: VOCAB_SIZE - 1)
    assert greedy(trained, [1], 10) == []


def test_top_k_draws_from_the_likeliest_only():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    config = GenerateConfig(load="x", temperature=5.0, top_k=2)
    random = torch.Generator().manual_seed(0)
    drawn = {pick(logits, config, random) for _ in range(100)}
    assert drawn == {1, 2}
    assert pick(logits, GenerateConfig(load="x"), random) == 1


def test_nothing_to_load(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["generate", "--load", str(tmp_path), "--prompt", "1"]) == 4
    assert "holds no complete checkpoint" in capsys.readouterr().err
