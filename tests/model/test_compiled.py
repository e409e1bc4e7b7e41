"""Compiled layers compute what eager ones do: losses, gradients, dropout masks, also recomputed and in evaluation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.runs import tiny_flags
from trimegatron import train
from trimegatron.errors import ConfigError
from trimegatron.model import compiled
from trimegatron.model.compiled import check_compiler, compile_layers
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.recompute import Recompute
from trimegatron.model.spec import GPTSpec

SPEC = GPTSpec(2, 24, 48, 2, 12, 8, 29, 32)
TOKENS = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(0))
SAMPLES = torch.tensor([5, 2**33 + 1])


def losses_and_gradients(spec: GPTSpec, backend: str | None) -> list[torch.Tensor]:
    """Of three steps of plain gradient descent, then the loss of an evaluation."""
    model = GPTStage(spec, range(spec.num_layers))
    initialize(model, spec.seed)
    if backend is not None:
        torch.compiler.reset()
        counters.clear()
        compile_layers([model], backend=backend)
    found = []
    for _ in range(3):
        loss = model(TOKENS, labels=TOKENS, sample_numbers=SAMPLES)
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad)
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
    model.eval()
    with torch.no_grad():
        return [*found, model(TOKENS, labels=TOKENS)]


@pytest.mark.parametrize(
    ("dropout", "granularity"), [(0.0, None), (0.0, "selective"), (0.1, "selective"), (0.1, "full")]
)
def test_same_as_eager(dropout: float, granularity: str | None):
    recompute = Recompute(granularity, "uniform" if granularity == "full" else None, 2)
    spec = dataclasses.replace(SPEC, attention_dropout=dropout, hidden_dropout=dropout, recompute=recompute)
    eager = losses_and_gradients(spec, None)
    for one, other in zip(losses_and_gradients(spec, "aot_eager"), eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # One graph to train and one to evaluate; a layer's own to train where its masks are in it.
    assert counters["stats"]["unique_graphs"] == (3 if dropout else 2)


@pytest.mark.long
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_same_as_eager_in_cpp(dropout: float):
    spec = dataclasses.replace(SPEC, attention_dropout=dropout, hidden_dropout=dropout)
    first, again = (losses_and_gradients(spec, "inductor") for _ in range(2))
    for one, same, other in zip(first, again, losses_and_gradients(spec, None), strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reset_attention_mask": True}, "does not go with --reset-attention-mask yet"),
        ({"tensor_model_parallel_size": 2}, "does not go with --tensor-model-parallel-size 2 yet"),
    ],
)
def test_refused(corpus: Path, capsys: pytest.CaptureFixture, changes: dict, message: str):
    flags = tiny_flags(corpus, compile=True, dry_run=True, world_size=2, **changes)
    assert train.main(flags) == 2
    assert message in capsys.readouterr().err


def test_needs_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs the C\+\+ compiler no-such-compiler"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))  # there it is Triton that compiles


def test_the_trainer_compiles(corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    torch.compiler.reset()
    counters.clear()
    # Its own function, with a backend that does not take a minute.
    monkeypatch.setattr(train, "compile_layers", lambda model: compiled.compile_layers(model, backend="aot_eager"))
    assert train.main(tiny_flags(corpus, compile=True, train_iters=2, attention_dropout=0, hidden_dropout=0)) == 0
    assert "one graph for all" in capsys.readouterr().out
    assert counters["stats"]["unique_graphs"] >= 1
