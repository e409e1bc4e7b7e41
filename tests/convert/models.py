"""Random models as sources of conversions, and their checkpoints in any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimegatron.checkpoint.checkpoint import Progress
from trimegatron.checkpoint.directory import TOKENIZER, checkpoint_folder, flush_files, publish, temporary_folder
from trimegatron.checkpoint.stored import SHARDING_KEY
from trimegatron.config import Config, DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig
from trimegatron.convert.from_megatron import layers_of_chunk
from trimegatron.convert.source import MASTER, MODEL, MOMENTS, Source, new_state, parameters_of
from trimegatron.lazy import cut, in_memory
from trimegatron.mesh import Axis
from trimegatron.model.build import global_shapes
from trimegatron.safetensors_file import write_safetensors
from trimegatron.tokenizer import NullTokenizer

VOCAB_SIZE = 1003


def random_source(
    *, dtype: str = "float32", with_optimizer: bool = True, vocab_size: int = VOCAB_SIZE, **changes: Any
) -> Source:
    """A run with noise in every tensor: 2 layers, 4 heads of 6, MLP width 40, epsilon 1e-6."""
    model = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "ffn_hidden_size": 40,
        "max_position_embeddings": 16,
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": 8,
        "layernorm_epsilon": 1e-6,
    }
    config = Config(
        model=ModelConfig(**(model | changes)),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=2),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=20),
        data=DataConfig(seq_length=16, tokenizer_type="NullTokenizer"),
        precision=PrecisionConfig(fp16=dtype == "float16", bf16=dtype == "bfloat16"),
    )
    random = torch.Generator().manual_seed(5)
    kinds = [MODEL, *(MOMENTS if with_optimizer else ()), *((MASTER,) if with_optimizer and dtype != "float32" else ())]
    tensors = {
        kind: {
            name: in_memory(
                (0.3 * torch.randn(shape, generator=random)).to(getattr(torch, dtype if kind == MODEL else "float32"))
            )
            for name, shape in global_shapes(config).items()
        }
        for kind in kinds
    }
    state = new_state(
        config,
        progress=Progress(iteration=9, consumed_samples=72, scheduled_samples=64, skipped_iterations=1),
        optimizer_step=8,
        scaler={"scale": 1024.0, "clean_steps": 3, "tolerance": 2} if dtype == "float16" else {"scale": 1.0},
    )
    return Source(Path("random"), config, state, NullTokenizer(vocab_size - 1), tensors)


def write_layout(source: Source, root: Path, *, tp: int, pp: int) -> None:
    """The checkpoint that tp × pp ranks would save: a file for each with its rectangles."""
    iteration = source.state.progress.iteration
    temporary = temporary_folder(root, iteration)
    temporary.mkdir(parents=True)
    for p in range(pp):
        layers = layers_of_chunk(source.config.model.num_layers, pp, 1, p, 0)
        for t in range(tp):
            places = parameters_of(
                source.config, layers=layers, tensor=Axis(tp, t), is_first=p == 0, is_last=p == pp - 1
            )
            tensors, where = {}, {}
            for kind, named in source.tensors.items():
                for name, (spec, _) in places.items():
                    if spec.is_tied_copy or (t > 0 and not spec.is_sharded) or 0 in spec.extent:
                        continue
                    piece = cut(named[name], spec.offsets, spec.extent, spec.extent)
                    tensors[f"{kind}.{name}"] = in_memory(piece)
                    where[f"{kind}.{name}"] = {"saved_offsets": list(spec.offsets)}
            path = temporary / f"shard-{p * tp + t:05d}.safetensors"
            write_safetensors(path, tensors, {"format": "pt", SHARDING_KEY: json.dumps(where)}, lambda _: None)
    source.state.write(temporary)
    source.tokenizer.save(temporary / TOKENIZER)
    files = [path for path in temporary.rglob("*") if path.is_file()]
    publish(temporary, checkpoint_folder(root, iteration), flush_files(temporary, files))


def with_tensor(source: Source, name: str, tensor: torch.Tensor | None) -> Source:
    """``source`` with one weight more, another, or without it."""
    model = {key: value for key, value in source.model.items() if key != name}
    if tensor is not None:
        model[name] = in_memory(tensor)
    return replace(source, tensors=source.tensors | {MODEL: model})
