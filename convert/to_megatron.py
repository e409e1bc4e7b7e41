"""A run becomes a checkpoint of Megatron-LM's as it was in 2022: one file of torch.save's for each rank.

These files are pickles because Megatron-LM reads nothing else; they are written only by this command.
"""

from __future__ import annotations

import enum
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trimegatron.checkpoint.directory import TOKENIZER, TRACKER, checkpoint_folder
from trimegatron.config import Config
from trimegatron.config.options import fail
from trimegatron.convert.from_megatron import layers_of_chunk, read_megatron
from trimegatron.convert.megatron_args import args_from_config
from trimegatron.convert.megatron_files import RELEASE
from trimegatron.convert.megatron_names import WORDS, megatron_name
from trimegatron.convert.output import Progress, whole_folder
from trimegatron.convert.source import MASTER, MODEL, MOMENTS, LocalParameter, Source, parameters_of
from trimegatron.convert.to_ours import check_same
from trimegatron.convert.torch_file import save_torch_file
from trimegatron.lazy import LazyTensor, cut
from trimegatron.mesh import Axis
from trimegatron.tensor_parallel.embedding import padded_vocab_size

VERSION = 3.0
PythonPickler: Any = pickle._Pickler
"""The standard library's pickler in Python, whose steps can be changed; the one in C has none."""


class ModelType(enum.Enum):
    """Megatron-LM's, of which its checkpoints hold a member; :class:`_Pickler` gives it its name there."""

    encoder_or_decoder = 1


class _Pickler(PythonPickler):
    """Names :class:`ModelType` as Megatron-LM's own, which need not be installed here."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is ModelType:
            self.write(pickle.GLOBAL + b"megatron.model.enums\nModelType\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def write_megatron(source: Source, root: Path, *, tp: int, pp: int, verify: bool = True) -> int | None:
    """Write ``root``; it appears whole or not at all, and with ``verify`` only when every tensor was read back
    from it bit for bit; returns how many.

    Raises:
        ConfigError: the model cannot be cut so, or ``root`` holds something already.
    """
    check_cut(source.config, tp, pp)
    iteration = source.state.progress.iteration
    if iteration == 0:  # which Megatron-LM knows as a release only, and that without an optimizer
        source = source.without_optimizer()
    kinds = [kind for kind in (MODEL, *MOMENTS, MASTER) if kind in source.tensors]
    total = sum(tensor.num_bytes for kind in kinds for tensor in source.tensors[kind].values())
    with whole_folder(root, "--save") as temporary:
        folder = checkpoint_folder(temporary, iteration) if iteration else temporary / RELEASE
        bar = Progress(total, "writing")
        for p in range(pp):
            for t in range(tp):
                rank = folder / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}")
                rank.mkdir(parents=True)
                path = rank / "model_optim_rng.pt"
                save(content_of_rank(source, t, p, tp, pp), path)
                bar.count(path.stat().st_size)
        bar.close()
        source.tokenizer.save(folder / TOKENIZER)
        (temporary / TRACKER).write_text(str(iteration) if iteration else RELEASE)
        if not verify:
            return None
        written = read_megatron(temporary, mask_padded_vocab=source.config.model.mask_padded_vocab)
        return check_same(source, written)


def check_cut(config: Config, tp: int, pp: int) -> None:
    """Refuse a layout that Megatron-LM would refuse. Raises ConfigError."""
    model = config.model
    for name, size, values in (
        ("target_tensor_parallel_size", tp, {"heads": model.num_attention_heads, "MLP width": model.ffn_hidden_size}),
        ("target_pipeline_parallel_size", pp, {"layers": model.num_layers}),
    ):
        for what, value in values.items():
            if value % size:
                fail(name, size, f"must divide the model's {what} ({value})", way_out="Give another size.")
    words = model.vocab_size
    assert words is not None
    padded = padded_vocab_size(words, model.make_vocab_size_divisible_by, tp)
    if not model.mask_padded_vocab and padded != words:
        fail(
            "target_tensor_parallel_size",
            tp,
            f"would pad the vocabulary from {words} to {padded} words, all of which take probability",
            way_out="Give a smaller size.",
        )


def save(content: dict[str, Any], path: Path) -> None:
    """Write one file and flush it to the disk."""
    save_torch_file(content, path, SimpleNamespace(Pickler=_Pickler, __name__="pickle"))


def content_of_rank(source: Source, t: int, p: int, tp: int, pp: int) -> dict[str, Any]:
    """What tensor-parallel rank ``t`` of stage ``p`` holds."""
    config, progress = source.config, source.state.progress
    layers = layers_of_chunk(config.model.num_layers, pp, 1, p, 0)
    places = parameters_of(config, layers=layers, tensor=Axis(tp, t), is_first=p == 0, is_last=p == pp - 1)
    if p > 0 and WORDS in places:
        places[WORDS] = places.pop(WORDS)  # the head's copy comes last
    args = args_from_config(
        config, tp=tp, pp=pp, consumed_samples=progress.consumed_samples, iteration=progress.iteration
    )
    content = {
        "args": Namespace(**args, model_type=ModelType.encoder_or_decoder),
        "checkpoint_version": VERSION,
        "iteration": progress.iteration,
        "model": nested_model(local_tensors(source.model, places), layers.start, is_first=p == 0),
    }
    if MOMENTS[0] in source.tensors:
        content["optimizer"] = optimizer(source, places)
        content["opt_param_scheduler"] = scheduler(source)
    return content


def local_tensors(tensors: dict[str, LazyTensor], places: dict[str, LocalParameter]) -> dict[str, torch.Tensor]:
    """A rank's pieces, with the padding of the vocabulary."""
    return {name: cut(tensors[name], spec.offsets, spec.extent, shape) for name, (spec, shape) in places.items()}


def nested_model(tensors: dict[str, torch.Tensor], first_layer: int, *, is_first: bool) -> dict[str, Any]:
    """The tables inside tables that a stage's ``model`` is."""
    language_model: dict[str, Any] = {}
    head: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name == WORDS and not is_first:
            head = {"word_embeddings_for_head": OrderedDict(weight=tensor)}
            continue
        part, _, rest = megatron_name(name, first_layer).partition(".")
        if part == "embedding":
            table = rest.removesuffix(".weight")
            language_model.setdefault(part, {})[table] = OrderedDict(weight=tensor)
        else:
            language_model.setdefault(part, OrderedDict())[rest] = tensor
    return {"language_model": language_model} | head


def optimizer(source: Source, places: dict[str, LocalParameter]) -> dict[str, Any]:
    """Moments by number, decayed parameters first, and in half precision the main weights and the loss scale."""
    config, state = source.config, source.state
    groups = [[name for name, (_, shape) in places.items() if (len(shape) > 1) == decays] for decays in (True, False)]
    numbered = [name for group in groups for name in group]
    moments = {kind: local_tensors(source.tensors[kind], places) for kind in MOMENTS}
    samples = state.progress.scheduled_samples
    shared = {
        "lr_mult": 1.0,
        "lr": config.schedule.learning_rate(samples),
        "bias_correction": True,
        "betas": (config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        "eps": config.optimizer.adam_eps,
        "step": state.optimizer_step,
    }
    decay = config.schedule.weight_decay(samples)
    inner = {
        "state": {
            i: {"exp_avg": moments[MOMENTS[0]][name], "exp_avg_sq": moments[MOMENTS[1]][name]}
            for i, name in enumerate(numbered)
        },
        "param_groups": [
            shared | {"wd_mult": 1.0, "weight_decay": decay, "params": list(range(len(groups[0])))},
            shared | {"wd_mult": 0.0, "weight_decay": 0.0, "params": list(range(len(groups[0]), len(numbered)))},
        ],
    }
    if MASTER not in source.tensors:
        return inner
    masters = local_tensors(source.tensors[MASTER], places)
    outer: dict[str, Any] = {
        "optimizer": inner,
        "fp32_from_fp16_params": [[masters[name] for name in group] for group in groups],
    }
    if config.precision.fp16:
        scaler = state.scaler
        outer["grad_scaler"] = {"scale": torch.tensor([scaler["scale"]])}
        if "clean_steps" in scaler:
            outer["grad_scaler"] |= {
                "growth_tracker": int(scaler["clean_steps"]),
                "hysteresis_tracker": int(scaler["tolerance"]),
            }
    return outer


def scheduler(source: Source) -> dict[str, Any]:
    """``opt_param_scheduler``: all steps are samples."""
    schedule = source.config.schedule
    return {
        "max_lr": schedule.lr,
        "lr_warmup_steps": schedule.warmup_samples,
        "num_steps": source.state.progress.scheduled_samples,
        "lr_decay_style": schedule.style,
        "lr_decay_steps": schedule.decay_samples,
        "min_lr": schedule.min_lr,
        "start_wd": schedule.start_weight_decay,
        "end_wd": schedule.end_weight_decay,
        "wd_incr_style": schedule.weight_decay_style,
        "wd_incr_steps": schedule.total_samples,
    }
