"""Recomputation: which layers are replayed, the same bits as without, and what is no longer kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.parallel import run_ranks
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.mesh import Mesh, close_mesh, init_mesh
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.recompute import Recompute, Run
from trimegatron.model.spec import GPTSpec
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.gradients import squared_norms

CPU = torch.device("cpu")
SPEC = GPTSpec(3, 24, 48, 2, 12, 8, 29, 32)
TOKENS = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(0))
SAMPLES = torch.tensor([5, 2**33 + 1])
STARTS = torch.tensor([0, 0, 0, 3, 3, 3, 6, 6]).expand(2, -1)
FORMS = {
    "nothing": Recompute(),
    "selective": Recompute("selective"),
    "uniform 1": Recompute("full", "uniform", 1),
    "uniform 2": Recompute("full", "uniform", 2),
    "block 2": Recompute("full", "block", 2),
}


def train(spec: GPTSpec, mesh: Mesh, document_starts: torch.Tensor | None) -> torch.Tensor:
    """Three steps: each one's loss and squared norm, then the weights."""
    model = GPTStage(spec, range(spec.num_layers))
    initialize(model, spec.seed)
    buffer = ParameterBuffer(model.named_parameters(), grad_dtype=torch.float32, mesh=mesh)
    optimizer = FlatAdamW(buffer, beta1=0.9, beta2=0.99, epsilon=1e-8, kernels="auto")
    numbers = []
    for _ in range(3):
        buffer.start(num_micro_batches=1)
        loss = model(TOKENS, labels=TOKENS, sample_numbers=SAMPLES, document_starts=document_starts)
        loss.backward()
        buffer.finish()
        squares = torch.stack(squared_norms(buffer.counted_grads(), device=CPU, kernels="auto")).sum()
        if mesh.tensor.group is not None:
            dist.all_reduce(squares, group=mesh.tensor.group)
        numbers += [loss.detach(), squares]
        optimizer.step(lr=1e-2, weight_decay=0.1, grad_multiplier=torch.tensor(1.0))
    return torch.cat([torch.stack(numbers), buffer.params])


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # torch's attention and the softmax one
@pytest.mark.parametrize("document_starts", [None, STARTS], ids=["one document", "documents"])
def test_same_bits(dropout: float, document_starts: torch.Tensor | None):
    spec = dataclasses.replace(SPEC, attention_dropout=dropout, hidden_dropout=dropout)
    runs = {
        name: train(dataclasses.replace(spec, recompute=r), Mesh(CPU), document_starts) for name, r in FORMS.items()
    }
    for name, run in runs.items():
        assert torch.equal(run, runs["nothing"]), name


def train_every_form() -> list[torch.Tensor]:
    mesh = init_mesh(CPU, tensor_parallel_size=2)
    try:
        spec = dataclasses.replace(SPEC, tensor=mesh.tensor, sequence_parallel=True)
        return [train(dataclasses.replace(spec, recompute=recompute), mesh, STARTS) for recompute in FORMS.values()]
    finally:
        close_mesh()


def test_same_bits_with_sequence_parallelism():
    for first, *others in run_ranks(2, train_every_form):
        assert all(torch.equal(other, first) for other in others)
        alone = train(SPEC, Mesh(CPU), STARTS)
        torch.testing.assert_close(first[:6], alone[:6], rtol=1e-5, atol=0)


def test_runs_follow_megatron():
    """Uniform: all layers, in runs of so many, the last shorter. Block: the first so many, one by one."""
    assert Recompute().runs(5) == Recompute("selective").runs(5) == [Run(0, 5, False)]
    assert Recompute("full", "uniform", 2).runs(5) == [Run(0, 2, True), Run(2, 4, True), Run(4, 5, True)]
    assert Recompute("full", "block", 2).runs(5) == [Run(0, 1, True), Run(1, 2, True), Run(2, 5, False)]
    assert Recompute("full", "block", 7).runs(2) == [Run(0, 1, True), Run(1, 2, True)]
    assert Recompute("full", "uniform", 1).runs(0) == []


@pytest.mark.parametrize(("name", "replayed"), [("nothing", 0), ("selective", 0), ("uniform 2", 3), ("block 2", 2)])
def test_layers_are_replayed(name: str, replayed: int):
    """How often layers and attention cores run again in backward."""
    model = GPTStage(dataclasses.replace(SPEC, recompute=FORMS[name]), range(3))
    initialize(model, 1)
    loss = model(TOKENS, labels=TOKENS, sample_numbers=SAMPLES)
    calls = {"layer": 0, "core": 0}

    def count(what: str) -> None:
        calls[what] += 1

    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda *_: count("layer"))
        layer.self_attention.core.register_forward_pre_hook(lambda *_: count("core"))
    loss.backward()
    assert calls == {"layer": replayed, "core": 3 if name == "selective" else replayed}
