"""The model in itself: initial weights, stages, dropout, causality, gradients against an independent GPT-2."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trimegatron.convert.gpt2 import to_gpt2
from trimegatron.lazy import in_memory
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import ROWS_PER_BLOCK, initialize, normal_rows
from trimegatron.model.spec import GPTSpec

SPEC = GPTSpec(
    num_layers=4,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=3,
    kv_channels=16,
    max_position_embeddings=12,
    vocab_size=61,
    padded_vocab_size=64,
)
TOKENS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
SAMPLES = torch.tensor([5, 2**33 + 1])


def model(**changes) -> GPTStage:
    stage = GPTStage(dataclasses.replace(SPEC, **changes), range(SPEC.num_layers))
    initialize(stage, SPEC.seed)
    return stage


def test_initial_weights_follow_megatron():
    """N(0, 0.02), output layers N(0, 0.02 / √(2 · layers)), norms 1, biases and padding 0."""
    big = GPTSpec(2, 256, 1024, 4, 64, 64, 1000, 1024)
    stage = GPTStage(big, range(2))
    initialize(stage, 1234)
    for name, parameter in stage.named_parameters():
        if name.endswith("layernorm.weight"):
            assert torch.all(parameter == 1)
        elif name.endswith("bias"):
            assert torch.all(parameter == 0)
        else:
            scaled = name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
            values = parameter[:1000] if "word" in name else parameter
            assert values.std().item() == pytest.approx(0.01 if scaled else 0.02, rel=0.02), name
            assert abs(values.mean().item()) < 5e-4
    assert torch.all(stage.embedding.word_embeddings.weight[1000:] == 0)


def test_rows_do_not_depend_on_which_are_drawn():
    whole = normal_rows(7, "a", 0, 3 * ROWS_PER_BLOCK + 5, 6)
    for start, stop in [(0, 1), (60, 70), (ROWS_PER_BLOCK, 2 * ROWS_PER_BLOCK), (190, 197), (5, 5)]:
        np.testing.assert_array_equal(normal_rows(7, "a", start, stop, 6), whole[start:stop])
    assert not np.array_equal(whole, normal_rows(8, "a", 0, len(whole), 6))
    assert not np.array_equal(whole, normal_rows(7, "b", 0, len(whole), 6))


def test_gradients_equal_transformers():
    """Loss and every gradient of the same weights in transformers' GPT-2, an independent implementation."""
    ours = model(attention_dropout=0.0, hidden_dropout=0.0)
    for name, parameter in ours.named_parameters():
        if name.endswith("bias"):  # zero biases would hide a wrong one
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    settings = {"num_layers": SPEC.num_layers, "num_attention_heads": SPEC.num_attention_heads}

    def as_gpt2(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values["embedding.word_embeddings.weight"] = values["embedding.word_embeddings.weight"][: SPEC.vocab_size]
        tensors = to_gpt2({name: in_memory(value) for name, value in values.items()}, **settings)
        return {name: tensor.load() for name, tensor in tensors.items()}

    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_positions=12, n_embd=48, n_layer=4, n_head=3, n_inner=96, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, activation_function="gelu_new", bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    theirs.load_state_dict(as_gpt2({n: p.detach().clone() for n, p in ours.named_parameters()}), strict=False)
    theirs.tie_weights()
    labels = TOKENS.roll(-1, dims=1)
    loss = ours(TOKENS, labels=labels) / labels.numel()
    loss.backward()
    expected = torch.nn.functional.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    gradients = as_gpt2({n: p.grad for n, p in ours.named_parameters() if p.grad is not None})
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("backend", ["auto", "softmax"])
def test_no_token_sees_a_later_one(backend: str):
    stage = model(attention_backend=backend).eval()
    changed = TOKENS.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 61
    with torch.no_grad():
        one, other = stage(TOKENS), stage(changed)
    assert torch.equal(one[:7], other[:7])
    assert not torch.equal(one[7:], other[7:])


def test_dropout_is_a_function_of_seed_and_sample():
    """The same samples give the same loss in any batch and order; another sample, seed, or no dropout does not."""
    stage = model()
    loss = stage(TOKENS, labels=TOKENS, sample_numbers=SAMPLES)
    assert torch.equal(loss, stage(TOKENS, labels=TOKENS, sample_numbers=SAMPLES))
    apart = [stage(TOKENS[i : i + 1], labels=TOKENS[i : i + 1], sample_numbers=SAMPLES[i : i + 1]) for i in (1, 0)]
    torch.testing.assert_close(loss, sum(apart))
    assert not torch.isclose(loss, stage(TOKENS, labels=TOKENS, sample_numbers=SAMPLES + 1))
    assert not torch.isclose(loss, model(seed=99)(TOKENS, labels=TOKENS, sample_numbers=SAMPLES))
    stage.eval()
    assert not torch.isclose(loss, stage(TOKENS, labels=TOKENS))


def test_stages_in_a_row_are_the_model():
    """Cut after any layer: the same parameter names and weights, the same loss; the tied table is on both ends."""
    whole = model()
    first = GPTStage(SPEC, range(1), is_last=False)
    middle = GPTStage(SPEC, range(1, 3), is_first=False, is_last=False)
    last = GPTStage(SPEC, range(3, 4), is_first=False)
    parameters = dict(whole.named_parameters())
    seen = set()
    for stage in (first, middle, last):
        initialize(stage, SPEC.seed)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, parameters[name]), name
            seen.add(name)
    assert seen == set(parameters)
    x = middle(first(TOKENS, sample_numbers=SAMPLES), sample_numbers=SAMPLES)
    loss = last(x, labels=TOKENS, sample_numbers=SAMPLES)
    assert torch.equal(loss, whole(TOKENS, labels=TOKENS, sample_numbers=SAMPLES))


def test_query_key_layer_scaling_changes_half_precision_only():
    plain, scaled = (model(attention_backend="softmax", apply_query_key_layer_scaling=s).eval() for s in (False, True))
    with torch.no_grad():
        assert torch.equal(plain(TOKENS), scaled(TOKENS))
        plain, scaled = (
            model(attention_backend="softmax", apply_query_key_layer_scaling=s, dtype=torch.bfloat16).eval()
            for s in (False, True)
        )
        one, other = plain(TOKENS).float(), scaled(TOKENS).float()
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
