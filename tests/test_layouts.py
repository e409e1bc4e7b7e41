"""Every layout is the same run: losses and gradient norms equal to the single process's, dropout on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runs import train_tiny, write_corpus

LAYOUTS = [(2, 1, None), (1, 2, None), (1, 2, True), (2, 2, True), (1, 4, None), (1, 4, True)]
"""Data parallel, tensor parallel, sequence parallel."""


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return train_tiny(corpus, metrics=tmp_path_factory.mktemp("alone") / "metrics.jsonl")


def assert_same_run(lines: list[dict], reference: list[dict]) -> None:
    assert [line["iteration"] for line in lines] == [line["iteration"] for line in reference] == list(range(1, 21))
    for name in ("lm_loss", "grad_norm"):
        np.testing.assert_allclose(
            [line[name] for line in lines], [line[name] for line in reference], rtol=1e-5, err_msg=name
        )
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in reference]


def test_it_learns(alone: list[dict]):
    assert alone[-1]["lm_loss"] < alone[0]["lm_loss"] - 0.5


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "sequence_parallel"), LAYOUTS)
def test_layout(
    data_parallel: int,
    tensor_parallel: int,
    sequence_parallel: bool | None,
    corpus: Path,
    alone: list[dict],
    tmp_path: Path,
):
    """20 steps, dropout 0.1, a vocabulary that no tensor-parallel size divides."""
    lines = train_tiny(
        corpus,
        world_size=data_parallel * tensor_parallel,
        metrics=tmp_path / "metrics.jsonl",
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
    assert_same_run(lines, alone)


def test_three_words_on_four_ranks(tmp_path: Path):
    """Each rank holds one row of the table, the last only padding."""
    write_corpus(tmp_path / "text", vocab_size=3)
    few = {"vocab_size": 2, "make_vocab_size_divisible_by": 1}
    whole = train_tiny(tmp_path / "text", metrics=tmp_path / "whole.jsonl", **few)
    few |= {"tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert_same_run(train_tiny(tmp_path / "text", world_size=4, metrics=tmp_path / "cut.jsonl", **few), whole)


@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_micro_batch_size(micro_batch_size: int, corpus: Path, alone: list[dict], tmp_path: Path):
    lines = train_tiny(corpus, metrics=tmp_path / "metrics.jsonl", micro_batch_size=micro_batch_size)
    assert_same_run(lines, alone)


def test_masked_tokens_weigh_alike_however_the_batch_is_cut(corpus: Path, tmp_path: Path):
    """With --eod-mask-loss micro-batches hold unequal numbers of tokens that count. (The end token is 210, a word
    of the corpus.)
    """
    whole = train_tiny(corpus, metrics=tmp_path / "whole.jsonl", micro_batch_size=8, eod_mask_loss=True)
    cut = train_tiny(corpus, world_size=2, metrics=tmp_path / "cut.jsonl", micro_batch_size=1, eod_mask_loss=True)
    assert_same_run(cut, whole)


@pytest.mark.parametrize("attention_dropout", [0.1, 0.0])  # the softmax backend and torch's attention
def test_document_boundaries_in_every_layout(attention_dropout: float, corpus: Path, tmp_path: Path):
    """The end token is 210, a word of the corpus."""
    asked = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    asked |= {"attention_dropout": attention_dropout}
    whole = train_tiny(corpus, metrics=tmp_path / "whole.jsonl", micro_batch_size=8, **asked)
    for world_size, tensor_parallel in [(2, 2), (2, 1)]:
        cut = train_tiny(
            corpus,
            world_size=world_size,
            metrics=tmp_path / f"{tensor_parallel}.jsonl",
            tensor_model_parallel_size=tensor_parallel,
            sequence_parallel=tensor_parallel > 1 or None,
            **asked,
        )
        assert_same_run(cut, whole)


@pytest.mark.parametrize("option", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_each_boundary_option_reaches_the_model(option: str, corpus: Path, alone: list[dict], tmp_path: Path):
    lines = train_tiny(corpus, metrics=tmp_path / "metrics.jsonl", **{option: True})
    assert abs(lines[-1]["lm_loss"] - alone[-1]["lm_loss"]) > 1e-4


def test_another_seed_is_another_run(corpus: Path, alone: list[dict], tmp_path: Path):
    lines = train_tiny(corpus, metrics=tmp_path / "metrics.jsonl", seed=1235)
    assert abs(lines[0]["lm_loss"] - alone[0]["lm_loss"]) > 1e-4


def test_the_same_command_gives_the_same_bits(corpus: Path, alone: list[dict], tmp_path: Path):
    lines = train_tiny(corpus, metrics=tmp_path / "metrics.jsonl")
    assert [(line["lm_loss"], line["grad_norm"]) for line in lines] == [
        (line["lm_loss"], line["grad_norm"]) for line in alone
    ]
