"""Tensor-parallel layers and cross entropy against the unsharded operation: values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.parallel import run_ranks
from trimegatron.kernels import functional
from trimegatron.mesh import Axis, close_mesh, init_mesh, select_device
from trimegatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trimegatron.tensor_parallel.embedding import VocabParallelEmbedding, padded_vocab_size
from trimegatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from trimegatron.tensor_parallel.parameter import make_parameter, spec_of
from trimegatron.tensor_parallel.remade import Remade

CPU = torch.device("cpu")
S, B, H, FFN = 8, 3, 8, 16


def rank_slice(whole: torch.Tensor, spec) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(spec.offsets, spec.extent, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, DY, W1, B1, W2 = (
    random(*shape, seed=i) for i, shape in enumerate([(S, B, H), (S, B, H), (FFN, H), (FFN,), (H, FFN)])
)
SCALE, SHIFT = 1 + 0.3 * random(H, seed=5), random(H, seed=6)


def two_layers(axis: Axis, sequence_parallel: bool, is_remade: bool) -> dict[str, torch.Tensor]:
    """Norm, column-parallel product, bias-GELU, row-parallel product; what it gives, and this rank's gradients."""
    settings = {"axis": axis, "init_std": 1.0, "dtype": torch.float32, "device": CPU}
    settings |= {"sequence_parallel": sequence_parallel}
    first = ColumnParallelLinear(H, FFN, add_bias=False, **settings)
    second = RowParallelLinear(FFN, H, **settings)
    for parameter, values in {first.weight: W1, first.bias: B1, second.weight: W2}.items():
        parameter.data.copy_(rank_slice(values, spec_of(parameter)))
    pieces = slice(axis.rank * S // axis.size, (axis.rank + 1) * S // axis.size) if sequence_parallel else slice(S)
    x, scale, shift = (tensor.clone().requires_grad_() for tensor in (X[pieces], SCALE, SHIFT))
    normed = Remade.by(functional.layer_norm, x, scale, shift)
    hidden = first(normed if is_remade else normed.value)
    active = Remade.by(functional.bias_gelu, hidden, first.bias)
    y = second(active if is_remade else active.value)
    y.backward(DY[pieces])
    wanted = {"dx": x, "scale": scale, "shift": shift, "w1": first.weight, "b1": first.bias, "w2": second.weight}
    gradients = {name: tensor.grad for name, tensor in wanted.items() if tensor.grad is not None}
    assert len(gradients) == len(wanted)
    return {"y": y.detach()} | gradients


def every_form(tensor_parallel_size: int) -> list[dict[str, torch.Tensor]]:
    """``two_layers`` without and with sequence parallelism."""
    mesh = init_mesh(select_device("cpu"), tensor_parallel_size=tensor_parallel_size)
    try:
        forms = []
        for sequence_parallel in (False, True):
            kept, remade = (two_layers(mesh.tensor, sequence_parallel, is_remade) for is_remade in (False, True))
            assert all(torch.equal(kept[name], remade[name]) for name in kept)
            forms.append(remade)
        return forms
    finally:
        close_mesh()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_linear_layers(size: int):
    """Against the unsharded formulas; remaking an input instead of keeping it changes no bit."""
    parameters = {"dx": X, "scale": SCALE, "shift": SHIFT, "w1": W1, "b1": B1, "w2": W2}
    whole = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    normed = F.layer_norm(whole["dx"], (H,), whole["scale"], whole["shift"])
    hidden = F.gelu(F.linear(normed, whole["w1"], whole["b1"]), approximate="tanh")
    y = F.linear(hidden, whole["w2"])
    y.backward(DY)
    expected = {"y": y.detach()} | {name: tensor.grad for name, tensor in whole.items()}
    for sequence_parallel, ranks in enumerate(zip(*run_ranks(size, every_form, size), strict=True)):
        for name, want in expected.items():
            pieces = [rank[name] for rank in ranks]
            if name in ("w1", "b1", "w2"):
                got = torch.cat(pieces, dim=1 if name == "w2" else 0)
            elif not sequence_parallel:  # every rank holds it alike
                assert all(torch.equal(piece, pieces[0]) for piece in pieces)
                got = pieces[0]
            else:
                got = torch.stack(pieces).sum(0) if name in ("scale", "shift") else torch.cat(pieces)
            torch.testing.assert_close(got, want, msg=f"{name}, sequence parallel {bool(sequence_parallel)}")


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
