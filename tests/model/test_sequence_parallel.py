"""The model with its activations cut along the sequence: training, evaluation and logits equal the whole model's."""

from __future__ import annotations

import dataclasses

import torch

from tests.parallel import run_ranks
from trimegatron.mesh import close_mesh, init_mesh
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.parameter import spec_of

SPEC = GPTSpec(2, 24, 48, 2, 12, 8, 29, 32)
TOKENS = torch.randint(29, (3, 8), generator=torch.Generator().manual_seed(0))
INPUTS = {
    "sample_numbers": torch.tensor([5, 2**33 + 1, 0]),
    "position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]).expand(3, -1),
    "document_starts": torch.tensor([0, 0, 0, 3, 3, 3, 3, 7]).expand(3, -1),
}


def stage(spec: GPTSpec, *cut: int, is_first: bool = True, is_last: bool = True) -> GPTStage:
    made = GPTStage(spec, range(*cut), is_first=is_first, is_last=is_last)
    initialize(made, spec.seed)
    return made


def results(spec: GPTSpec) -> dict[str, torch.Tensor]:
    """Losses and logits in the ways they are asked for, and the norm's gradient."""
    whole = stage(spec, 2)
    loss = whole(TOKENS, labels=TOKENS, **INPUTS)
    loss.backward()
    gradient = whole.get_parameter("final_layernorm.weight").grad
    assert gradient is not None
    first, last = stage(spec, 1, is_last=False), stage(spec, 1, 2, is_first=False)
    passed = first(TOKENS, **INPUTS)
    assert passed.shape[0] == 8 // (spec.tensor.size if spec.sequence_parallel else 1)
    in_stages = last(passed, labels=TOKENS, **INPUTS)
    whole.eval()
    with torch.no_grad():
        return {
            "loss": loss.detach(),
            "in stages": in_stages,
            "evaluation": whole(TOKENS, labels=TOKENS),
            "logits": whole(TOKENS),
            "gradient": gradient,
        }


def results_of_a_rank() -> dict[str, torch.Tensor]:
    mesh = init_mesh(torch.device("cpu"), tensor_parallel_size=2)
    try:
        return results(dataclasses.replace(SPEC, tensor=mesh.tensor, sequence_parallel=True))
    finally:
        close_mesh()


def test_equals_the_whole_model():
    ranks, whole = run_ranks(2, results_of_a_rank), results(SPEC)
    for rank in ranks:
        for name in ("loss", "in stages", "evaluation"):
            torch.testing.assert_close(rank[name], whole[name], rtol=1e-6, atol=0, msg=name)
    torch.testing.assert_close(torch.cat([rank["logits"] for rank in ranks], dim=-1), whole["logits"])
    torch.testing.assert_close(ranks[0]["gradient"] + ranks[1]["gradient"], whole["gradient"])


def test_partial_parameters():
    """What each rank sees a piece of the sequence for: norms, biases after a row-parallel layer, positions."""

    def partial(sequence_parallel: bool) -> set[str]:
        made = GPTStage(dataclasses.replace(SPEC, sequence_parallel=sequence_parallel), range(1))
        return {name for name, parameter in made.named_parameters() if spec_of(parameter).is_partial}

    norms = {"layers.0.input_layernorm", "layers.0.post_attention_layernorm", "final_layernorm"}
    assert partial(False) == set()
    assert partial(True) == {
        "embedding.position_embeddings.weight",
        "layers.0.self_attention.dense.bias",
        "layers.0.mlp.dense_4h_to_h.bias",
        *(f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")),
    }
