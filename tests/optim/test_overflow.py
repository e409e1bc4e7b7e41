"""One rank's gradient overflows: all skip the step, and a skipped step leaves everything as it was."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tests.parallel import run_ranks
from tests.runs import tiny_flags, write_corpus
from trimegatron import train
from trimegatron.config import parse_train_args
from trimegatron.mesh import close_mesh, init_mesh
from trimegatron.preflight import with_vocab_size
from trimegatron.tokenizer import build_tokenizer


def steps_with_an_overflow(flags: list[str]) -> dict[str, Any]:
    """Four steps, in the third of which the last rank alone has an infinite element in one gradient."""
    config = parse_train_args(flags, world_size=4)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.model.vocab_size)
    config = with_vocab_size(config, tokenizer)
    mesh = init_mesh(torch.device("cpu"), tensor_parallel_size=2)
    try:
        trainer = train.build_trainer(config, mesh, tokenizer, None, lambda *_: None)
        optimizer, is_poisoned = trainer.optimizer, False
        tensors = (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq, trainer.buffer.params)

        def poison(grad: torch.Tensor) -> torch.Tensor:
            if not is_poisoned or mesh.world.rank != 3:
                return grad
            grad = grad.clone()
            grad.view(-1)[7] = float("inf")
            return grad

        sharded = [piece.parameter for piece in trainer.buffer.slices if piece.spec.is_sharded]
        sharded[2].register_hook(poison)
        seen: dict[str, Any] = {"skipped": [], "unchanged": [], "steps": [], "scale": []}
        with closing(trainer.loader(trainer.datasets.train, 0)) as batches:
            for step in range(4):
                is_poisoned = step == 2
                before = [t.clone() for t in tensors]
                result = trainer.train_step(batches)
                trainer.progress.scheduled_samples += 0 if result.is_skipped else 8
                trainer.buffer.wait_for_params()
                seen["skipped"].append(result.is_skipped)
                seen["unchanged"].append([torch.equal(a, b) for a, b in zip(before, tensors, strict=True)])
                seen["steps"].append(optimizer.step_count)
                seen["scale"].append(trainer.scaler.scale)
        return seen | {"params": trainer.buffer.params.clone()}
    finally:
        close_mesh()


def test_an_overflow_on_one_rank(tmp_path: Path):
    write_corpus(tmp_path / "text")
    flags = tiny_flags(
        tmp_path / "text", fp16=True, initial_loss_scale=2.0**10, hysteresis=1, lr_warmup_iters=0, micro_batch_size=1,
        tensor_model_parallel_size=2, use_distributed_optimizer=True, overlap_grad_reduce=True,
        overlap_param_gather=True, ddp_bucket_size=1000, hidden_size=16, num_attention_heads=2,
    )  # fmt: skip
    ranks = run_ranks(4, steps_with_an_overflow, flags)
    for seen in ranks:
        assert seen["skipped"] == [False, False, True, False]
        assert seen["unchanged"][2] == [True] * 4
        assert not any(any(unchanged) for step, unchanged in enumerate(seen["unchanged"]) if step != 2)
        assert seen["steps"] == [1, 2, 2, 3]
        assert seen["scale"] == [2.0**10, 2.0**10, 2.0**9, 2.0**9]
    for tensor_rank in (0, 1):
        assert torch.equal(ranks[tensor_rank]["params"], ranks[tensor_rank + 2]["params"])
