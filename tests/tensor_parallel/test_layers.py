"""Tensor-parallel layers and cross entropy against the unsharded operation: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.parallel import run_ranks
from trimegatron.mesh import close_mesh, init_mesh, select_device
from trimegatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trimegatron.tensor_parallel.embedding import VocabParallelEmbedding, padded_vocab_size
from trimegatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from trimegatron.tensor_parallel.parameter import make_parameter, spec_of

CPU = torch.device("cpu")
S, B, H, FFN = 5, 3, 8, 16


def rank_slice(whole: torch.Tensor, spec) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(spec.offsets, spec.extent, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_layers(tensor_parallel_size: int) -> dict[str, torch.Tensor]:
    """Column- then row-parallel, as an MLP without its activation; what it gives, and this rank's gradients."""
    mesh = init_mesh(select_device("cpu"), tensor_parallel_size=tensor_parallel_size)
    try:
        settings = {"axis": mesh.tensor, "init_std": 1.0, "dtype": torch.float32, "device": CPU}
        first = ColumnParallelLinear(H, FFN, add_bias=True, **settings)
        second = RowParallelLinear(FFN, H, **settings)
        whole = {
            first.weight: random(FFN, H, seed=1),
            first.bias: random(FFN, seed=2),
            second.weight: random(H, FFN, seed=3),
        }
        for parameter, values in whole.items():
            parameter.data.copy_(rank_slice(values, spec_of(parameter)))
        x = random(S, B, H, seed=4).requires_grad_()
        y = second(first(x).relu())
        y.backward(random(S, B, H, seed=5))
        assert x.grad is not None and first.weight.grad is not None
        gradients = {"w1": first.weight, "b1": first.bias, "w2": second.weight}
        return {"y": y.detach(), "dx": x.grad} | {
            name: torch.stack([parameter.grad]) for name, parameter in gradients.items() if parameter.grad is not None
        }
    finally:
        close_mesh()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_linear_layers(size: int):
    w1, b1, w2 = (random(FFN, H, seed=1), random(FFN, seed=2), random(H, FFN, seed=3))
    for tensor in (w1, b1, w2):
        tensor.requires_grad_()
    x = random(S, B, H, seed=4).requires_grad_()
    y = F.linear(F.linear(x, w1, b1).relu(), w2)
    y.backward(random(S, B, H, seed=5))
    ranks = run_ranks(size, two_layers, size)
    for rank in ranks:  # what every rank must hold alike
        torch.testing.assert_close(rank["y"], y.detach())
        torch.testing.assert_close(rank["dx"], x.grad)
    for name, parameter, dim in (("w1", w1, 0), ("b1", b1, 0), ("w2", w2, 1)):
        gathered = torch.cat([rank[name][0] for rank in ranks], dim=dim)
        torch.testing.assert_close(gathered, parameter.grad)


SMOOTHING = 0.1


def embed_and_score(tensor_parallel_size: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Embedding of some tokens, and the loss and gradient of logits of the padded vocabulary."""
    mesh = init_mesh(select_device("cpu"), tensor_parallel_size=tensor_parallel_size)
    try:
        padded = padded_vocab_size(vocab_size, 4, tensor_parallel_size)
        embedding = VocabParallelEmbedding(
            vocab_size, padded, H, axis=mesh.tensor, init_std=1.0, dtype=torch.float32, device=CPU
        )
        spec = spec_of(embedding.weight)
        embedding.weight.data.fill_(float("nan"))  # the padding must never be read
        spec.valid(embedding.weight.data).copy_(rank_slice(random(vocab_size, H, seed=1), spec))
        tokens = torch.arange(vocab_size).flip(0).view(1, -1)
        rows = embedding(tokens)
        logits = torch.full((1, vocab_size, embedding.weight.shape[0]), 50.0, dtype=dtype)  # [s, b, v], padding large
        whole = random(1, vocab_size, vocab_size, seed=2).to(dtype) * 4
        start = mesh.tensor.rank * embedding.weight.shape[0]
        logits[..., : spec.extent[0]] = whole[..., start : start + spec.extent[0]]
        logits.requires_grad_()
        before = logits.detach().clone()
        upstream = torch.linspace(0.5, 1.5, vocab_size).view(1, -1)
        cut = {"vocab_start": embedding.vocab_start, "num_valid": embedding.num_valid, "group": mesh.tensor.group}
        loss = vocab_parallel_cross_entropy(logits, tokens, **cut)
        loss.backward(upstream)
        assert torch.equal(logits.detach(), before) and logits.grad is not None
        assert logits.grad[..., spec.extent[0] :].abs().sum() == 0
        smoothed = before.requires_grad_()
        smoothed_loss = vocab_parallel_cross_entropy(
            smoothed * 1, tokens, vocab_size=vocab_size, label_smoothing=SMOOTHING, in_place=True, **cut
        )
        smoothed_loss.backward(upstream)
        assert smoothed.grad is not None and smoothed.grad[..., spec.extent[0] :].abs().sum() == 0
        gradients = [grad[..., : spec.extent[0]] for grad in (logits.grad, smoothed.grad)]
        return rows.detach(), loss.detach(), smoothed_loss.detach(), *gradients
    finally:
        close_mesh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "vocab_size"), [(1, 11), (2, 11), (4, 11), (4, 3)])
def test_embedding_and_cross_entropy(size: int, vocab_size: int, dtype: torch.dtype):
    """Also where some ranks hold nothing but padding (3 words on 4 ranks)."""
    tokens = torch.arange(vocab_size).flip(0).view(1, -1)
    logits = (random(1, vocab_size, vocab_size, seed=2).to(dtype) * 4).requires_grad_()
    ranks = run_ranks(size, embed_and_score, size, vocab_size, dtype)
    for number, smoothing in enumerate((0.0, SMOOTHING * vocab_size / (vocab_size - 1))):  # PyTorch's, of all words
        logits.grad = None
        loss = F.cross_entropy(logits[0].float(), tokens[0], reduction="none", label_smoothing=smoothing).unsqueeze(0)
        loss.backward(torch.linspace(0.5, 1.5, vocab_size).view(1, -1))
        for rows, *losses_and_gradients in ranks:
            torch.testing.assert_close(rows, F.embedding(tokens, random(vocab_size, H, seed=1)))
            torch.testing.assert_close(losses_and_gradients[number], loss.detach())
            assert losses_and_gradients[number].dtype == torch.float32
        gradient = torch.cat([rank[3 + number] for rank in ranks], dim=-1)
        assert gradient.dtype == dtype and logits.grad is not None
        torch.testing.assert_close(gradient, logits.grad, atol=1e-6 if dtype == torch.float32 else 4e-3, rtol=1e-2)


def test_padded_vocabulary_follows_megatron():
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(512, 128, 4) == 512


def test_a_parameter_knows_its_place():
    parameter = make_parameter((3, 2), dtype=torch.float32, device=CPU)
    spec = spec_of(parameter)
    assert (spec.offsets, spec.extent, spec.is_sharded) == ((0, 0), (3, 2), False)
    assert spec.valid(parameter).shape == (3, 2)
