"""A checkpoint of Megatron-LM's, of any tensor × pipeline layout and version, as a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimegatron.checkpoint.checkpoint import Progress
from trimegatron.checkpoint.directory import TOKENIZER
from trimegatron.config import Config
from trimegatron.convert.lazy import LazyTensor, assemble, cast, is_equal
from trimegatron.convert.ledger import check_shapes, match
from trimegatron.convert.megatron_args import config_from_args
from trimegatron.convert.megatron_files import MegatronFiles, RankFile, read_megatron_files
from trimegatron.convert.megatron_names import HEADS, flatten, in_our_order, our_name
from trimegatron.convert.megatron_optimizer import OptimizerState, read_optimizer
from trimegatron.convert.source import MODEL, Source, global_shapes, new_state, parameters_of
from trimegatron.convert.vocabulary import VocabularyConfig, find_tokenizer
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.mesh import Axis
from trimegatron.tensor_parallel.embedding import padded_vocab_size
from trimegatron.tensor_parallel.parameter import ParameterSpec
from trimegatron.tokenizer import NullTokenizer, Tokenizer


@dataclass(frozen=True)
class Place:
    """One rank's piece of one parameter."""

    spec: ParameterSpec
    file: RankFile
    name: str
    """In the file."""
    tensor: LazyTensor


def read_megatron(
    root: Path,
    files: VocabularyConfig | None = None,
    *,
    ckpt_step: int | None = None,
    mask_padded_vocab: bool = True,
    with_optimizer: bool = True,
) -> Source:
    """The run in ``root``.

    Args:
        files: its tokenizer.
        mask_padded_vocab: leave the padding of the vocabulary out; else its rows are words like the others, which is
            how Megatron-LM computes.
        with_optimizer: take moments, main weights and loss scale along, where there are any.

    Raises:
        CheckpointError: there is none, it is damaged, of another model, or a tensor has no place.
        ConfigError: the tokenizer is missing, or of another size.
    """
    found = read_megatron_files(root, ckpt_step)
    args = found.first.args
    tokenizer = tokenizer_of(found, files or VocabularyConfig())
    config = config_from_args(
        args,
        where=found.folder,
        vocab_size=vocabulary(args, tokenizer, found, mask_padded_vocab),
        mask_padded_vocab=mask_padded_vocab,
        tokenizer_type=tokenizer.type,
        megatron_compat=compat_of(found),
    )
    pieces, optimizer = read_ranks(found, config, with_optimizer=with_optimizer and not found.is_release)
    tensors = {kind: merge(kind, places, config) for kind, places in pieces.items()}
    notes = [] if optimizer is not None else ["no optimizer state is taken along: go on with --finetune"]
    if with_optimizer and optimizer is None and not found.is_release:
        notes = ["the checkpoint holds no optimizer state: go on with --no-load-optim or --finetune"]
    if args.get("rampup_batch_size"):
        notes.append(f"it was trained with --rampup-batch-size {args['rampup_batch_size']}, which is not known here")
    state = new_state(
        config,
        progress=progress_of(found, config),
        optimizer_step=optimizer.step if optimizer else 0,
        scaler=optimizer.scaler if optimizer else None,
        data={"megatron_compat": config.data.megatron_compat},
    )
    return Source(found.folder, config, state, tokenizer, tensors, notes)


def compat_of(found: MegatronFiles) -> int:
    """Whose rules ordered the data: the names of Megatron-Core's parameters came with the newer ones; a checkpoint
    that we wrote says so itself.
    """
    said = found.first.args.get("megatron_compat")
    if said is not None:
        return said
    return 2022 if any("language_model" in chunk for chunk in found.first.chunks) else 2026


def tokenizer_of(found: MegatronFiles, files: VocabularyConfig) -> Tokenizer:
    """The one on the command line, else that which ``args`` name, where its files are on this machine."""
    args = found.first.args
    try:
        return find_tokenizer(files, found.folder / TOKENIZER, where=found.folder)
    except ConfigError:
        if files != VocabularyConfig():
            raise
        vocab, merges = (args.get(name) for name in ("vocab_file", "merge_file"))
        if args.get("tokenizer_type") == "NullTokenizer" and args.get("vocab_size"):
            return NullTokenizer(int(args["vocab_size"]))
        if vocab and merges and Path(vocab).is_file() and Path(merges).is_file():
            return find_tokenizer(
                VocabularyConfig(vocab_file=vocab, merge_file=merges), found.folder, where=found.folder
            )
        raise


def vocabulary(args: Mapping[str, Any], tokenizer: Tokenizer, found: MegatronFiles, mask_padded_vocab: bool) -> int:
    """How many words the model has here.

    Raises:
        ConfigError: the tokenizer's vocabulary is not what was padded.
    """
    divisor = args.get("make_vocab_size_divisible_by") or 128
    padded = args.get("padded_vocab_size")
    mine = padded_vocab_size(tokenizer.vocab_size, divisor, found.tp)
    if padded is not None and padded != mine:
        raise ConfigError(
            f"{found.folder} has a vocabulary padded to {padded}, to a multiple of {divisor} × {found.tp}; the "
            f"{tokenizer.vocab_size} words of this tokenizer make {mine}. Give the tokenizer it was trained with, or "
            "--true-vocab-size"
        )
    return tokenizer.vocab_size if mask_padded_vocab else mine


def progress_of(found: MegatronFiles, config: Config) -> Progress:
    """How far the run is; steps that were skipped count as samples and not for the schedule."""
    if found.is_release:
        return Progress()
    content = found.first.content
    consumed = int(found.first.args.get("consumed_train_samples", 0) or 0)
    scheduler = content.get("opt_param_scheduler") or content.get("lr_scheduler") or {}
    scheduled = int(scheduler.get("num_steps", consumed))
    skipped = max(0, consumed - scheduled) // config.training.global_batch_size
    return Progress(int(content.get("iteration", 0)), consumed, scheduled, skipped)


def read_ranks(
    found: MegatronFiles, config: Config, *, with_optimizer: bool
) -> tuple[dict[str, dict[str, list[Place]]], OptimizerState | None]:
    """Each rank's tensors under our names, by kind and name, and what else the optimizers hold.

    Raises:
        CheckpointError: a tensor has no place, is missing or of another size.
    """
    pieces: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    optimizers: dict[tuple[int, int], OptimizerState | None] = {}
    model = config.model
    if model.num_attention_heads % found.tp or model.num_layers % (found.pp * len(found.first.chunks)):
        raise CheckpointError(f"{found.folder}: its heads or layers cannot be cut into {found.tp} × {found.pp} ranks")
    for (t, p), file in sorted(found.ranks.items()):
        names: list[tuple[str, ParameterSpec]] = []  # of all chunks, in the order of the file
        for i, chunk in enumerate(file.chunks):
            layers = layers_of_chunk(model.num_layers, found.pp, len(file.chunks), p, i)
            expected = parameters_of(
                config,
                layers=layers,
                tensor=Axis(found.tp, t),
                is_first=layers.start == 0,
                is_last=layers.stop == model.num_layers,
            )
            flat = flatten(chunk)
            theirs = match(
                {name: name for name in flat},
                lambda name, first=layers.start: our_name(name, first),  # type: ignore[misc]
                expected,
                where=file.path,
            )
            if found.pp == 1 and any(name in HEADS for name in flat):
                raise CheckpointError(f"{file.path} holds a head of its own; only one tied to the words is supported")
            ours = {theirs[name]: name for name in expected}
            names += [(ours[name], expected[ours[name]][0]) for name in flat]
            shapes = {name: shape for name, (_, shape) in expected.items()}
            check_shapes({name: flat[theirs[name]].shape for name in expected}, shapes, where=file.path)
            for name, (spec, _) in expected.items():
                add(
                    pieces,
                    MODEL,
                    name,
                    spec,
                    file,
                    theirs[name],
                    flat[theirs[name]],
                    model.num_attention_heads // found.tp,
                )
        if with_optimizer:
            state = read_optimizer(file, names)
            optimizers[t, p] = state
            for kind, named in (state.tensors if state else {}).items():
                for (name, spec), tensor in zip(names, named, strict=True):
                    tensor = cast(tensor, torch.float32)
                    add(
                        pieces,
                        kind,
                        name,
                        spec,
                        file,
                        f"{kind} of {name}",
                        tensor,
                        model.num_attention_heads // found.tp,
                    )
    return pieces, agreed(found, optimizers)


def add(pieces, kind: str, name: str, spec: ParameterSpec, file: RankFile, theirs: str, tensor: LazyTensor, heads: int):
    pieces[kind][name].append(Place(spec, file, theirs, in_our_order(name, tensor, version=file.version, heads=heads)))


def agreed(found: MegatronFiles, optimizers: Mapping[tuple[int, int], OptimizerState | None]) -> OptimizerState | None:
    """What every rank's optimizer says alike.

    Raises:
        CheckpointError: they differ.
    """
    said = {(state.step, str(state.scaler)) if state else None for state in optimizers.values()}
    if len(said) > 1:
        raise CheckpointError(f"{found.folder}: the ranks' optimizers are not at one step: {said}")
    return next(iter(optimizers.values()), None)


def layers_of_chunk(num_layers: int, num_stages: int, num_chunks: int, stage: int, chunk: int) -> range:
    """The global numbers of a chunk's layers: chunk c of stage p begins at c · L/chunks + p · L/(stages · chunks)."""
    size = num_layers // (num_stages * num_chunks)
    first = chunk * (num_layers // num_chunks) + stage * size
    return range(first, first + size)


def merge(kind: str, places: Mapping[str, list[Place]], config: Config) -> dict[str, LazyTensor]:
    """Whole tensors from the ranks' pieces. What several ranks hold alike must be alike, the tied head included.

    Raises:
        CheckpointError: it is not.
    """
    tensors = {}
    for name, shape in global_shapes(config).items():
        mine = [place for place in places[name] if not place.spec.is_tied_copy]
        pieces: dict[tuple[int, ...], Place] = {}
        for place in mine:
            first = pieces.setdefault(place.spec.offsets if place.spec.is_sharded else (), place)
            if first is not place and not is_equal(first.tensor, place.tensor):
                raise unequal(first, place)
        for place in places[name]:
            if place.spec.is_tied_copy and not is_equal(pieces[place.spec.offsets].tensor, place.tensor):
                raise unequal(pieces[place.spec.offsets], place)
        whole = next(iter(pieces.values()))
        if len(pieces) == 1 and whole.tensor.shape == shape:
            tensors[name] = whole.tensor
        else:
            tensors[name] = assemble(shape, [(place.spec.offsets, place.tensor) for place in pieces.values()])
    return tensors


def unequal(one: Place, other: Place) -> CheckpointError:
    return CheckpointError(
        f"{one.name} in {one.file.path} and {other.name} in {other.file.path} must hold the same values and do not"
    )
