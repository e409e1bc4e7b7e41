"""Documents that share a sample: each gets the losses and gradients it has alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trimegatron.data.boundaries import DocumentBoundaries
from trimegatron.data.loader import Batch, make_batch
from trimegatron.model.attention import DocumentMask
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec

EOD = 60
SPEC = GPTSpec(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=3,
    kv_channels=16,
    max_position_embeddings=16,
    vocab_size=61,
    padded_vocab_size=64,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
SAMPLE_NUMBERS = torch.tensor([5, 2**33 + 1, 7])


def model(**changes) -> GPTStage:
    stage = GPTStage(dataclasses.replace(SPEC, **changes), range(SPEC.num_layers))
    initialize(stage, SPEC.seed)
    for name, parameter in stage.named_parameters():  # larger weights: attention that prefers some keys
        if name.endswith("weight") and "norm" not in name:
            parameter.data.mul_(4.0)
    return stage


def samples() -> np.ndarray:
    """[3, 17]: eods at the start, at the end, twice in a row, in the last label."""
    tokens = np.random.default_rng(1).integers(0, EOD, (3, 17))
    tokens[0, [0, 6, 15]] = EOD
    tokens[1, [4, 5, 16]] = EOD
    tokens[2, [9]] = EOD
    return tokens


def batch(**changes: bool) -> Batch:
    asked = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True} | changes
    return make_batch(samples(), SAMPLE_NUMBERS.tolist(), DocumentBoundaries(EOD, **asked))


def loss_of(stage: GPTStage, batch: Batch) -> torch.Tensor:
    return stage(
        batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        sample_numbers=batch.sample_numbers,
        position_ids=batch.position_ids,
        document_starts=batch.document_starts,
    )


def loss_one_by_one(stage: GPTStage, sample: list[int]) -> torch.Tensor:
    """The documents of one sample, each forwarded alone as a sample of its own."""
    inputs, labels = sample[:-1], sample[1:]
    ends = [i + 1 for i, token in enumerate(inputs) if token == EOD and i + 1 < len(inputs)]
    total = torch.zeros(())
    for start, stop in zip([0, *ends], [*ends, len(inputs)], strict=True):
        document = torch.tensor([inputs[start:stop]])
        counts = (document != EOD).float()
        total = total + stage(document, labels=torch.tensor([labels[start:stop]]), loss_mask=counts)
    return total


@pytest.mark.parametrize("backend", ["sdpa", "softmax"])
def test_each_document_as_if_alone(backend: str) -> None:
    """Losses and every gradient."""
    stage = model(attention_backend=backend)
    together = loss_of(stage, batch())
    together.backward()
    gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
    stage.zero_grad()
    alone = sum((loss_one_by_one(stage, sample) for sample in samples().tolist()), torch.zeros(()))
    alone.backward()
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("asked", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_each_option_counts(asked: str) -> None:
    """Without one of the three the loss is another."""
    stage = model().eval()
    with torch.no_grad():
        assert not torch.isclose(loss_of(stage, batch()), loss_of(stage, batch(**{asked: False})), rtol=1e-4)


def test_dropout_stays_with_the_position_in_the_sample() -> None:
    """Positions that do not restart and documents that start at 0 change nothing, with dropout on in every place."""
    stage = model(attention_dropout=0.2, hidden_dropout=0.2)
    plain = batch(reset_position_ids=False, reset_attention_mask=False)
    written_out = plain._replace(
        position_ids=torch.arange(16).expand(3, 16), document_starts=torch.zeros(3, 16, dtype=torch.int64)
    )
    torch.testing.assert_close(loss_of(stage, written_out), loss_of(stage, plain), rtol=1e-6, atol=0)
    # The document in the middle of a sample is dropped by its place there, not by its own positions.
    assert not torch.isclose(loss_of(stage, batch()), loss_one_by_one(stage.eval(), samples()[0].tolist()), rtol=1e-3)


def test_backends_agree() -> None:
    sdpa, softmax = (model(attention_backend=backend) for backend in ("sdpa", "softmax"))
    torch.testing.assert_close(loss_of(sdpa, batch()), loss_of(softmax, batch()), rtol=1e-6, atol=0)


def test_stages_in_a_row_are_the_model() -> None:
    whole, asked = model(), batch()
    first, last = GPTStage(SPEC, range(1), is_last=False), GPTStage(SPEC, range(1, 2), is_first=False)
    parameters = dict(whole.named_parameters())
    for stage in (first, last):
        stage.load_state_dict({name: parameters[name] for name, _ in stage.named_parameters()})
    x = first(asked.tokens, position_ids=asked.position_ids, document_starts=asked.document_starts)
    loss = last(x, labels=asked.labels, loss_mask=asked.loss_mask, document_starts=asked.document_starts)
    assert torch.equal(loss, loss_of(whole, asked))


def test_the_two_forms_of_the_mask() -> None:
    starts = torch.tensor([[0, 0, 2, 2, 4]])
    mask = DocumentMask(starts)
    expected = [[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 0, 1], [1, 1, 1, 1, 0]]
    assert mask.hidden.shape == (1, 1, 5, 5) and mask.hidden[0, 0].int().tolist() == expected
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(mask.bias(dtype), torch.zeros(1, 1, 5, 5, dtype=dtype).masked_fill(mask.hidden, -torch.inf))


def test_cudnn_never_gets_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = []

    def attention(*args, **kwargs):
        allowed.append((kwargs.get("attn_mask") is not None, torch.backends.cuda.cudnn_sdp_enabled()))
        return real(*args, **kwargs)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    stage = model(attention_backend="sdpa")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    loss_of(stage, batch())
    loss_of(stage, batch(reset_attention_mask=False))
    assert allowed == [(True, False)] * 2 + [(False, before)] * 2
