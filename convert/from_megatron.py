"""A checkpoint of Megatron-LM's, of any tensor × pipeline layout and version, as a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimegatron.checkpoint.checkpoint import Progress
from trimegatron.checkpoint.directory import TOKENIZER
from trimegatron.config import Config
from trimegatron.convert.from_torch_dist import left_out, read_whole
from trimegatron.convert.ledger import check_shapes, match
from trimegatron.convert.megatron_args import config_from_args
from trimegatron.convert.megatron_files import MegatronFiles, RankFile, read_megatron_files
from trimegatron.convert.megatron_names import HEADS, flatten, in_our_order, our_name
from trimegatron.convert.megatron_optimizer import OptimizerState, read_optimizer
from trimegatron.convert.source import MODEL, LocalParameter, Source, new_state, parameters_of
from trimegatron.convert.vocabulary import VocabularyConfig, find_tokenizer
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.lazy import LazyTensor, assemble, is_equal
from trimegatron.mesh import Axis
from trimegatron.model.build import global_shapes
from trimegatron.tensor_parallel.embedding import padded_vocab_size
from trimegatron.tensor_parallel.parameter import ParameterSpec
from trimegatron.tokenizer import NullTokenizer, Tokenizer


@dataclass(frozen=True)
class Place:
    """One rank's piece of one tensor."""

    tensor_rank: int
    spec: ParameterSpec
    path: Path
    name: str
    """Kind and parameter."""
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
        is_core=found.is_core,
        vocab_size=vocabulary(args, tokenizer, found, mask_padded_vocab),
        mask_padded_vocab=mask_padded_vocab,
        tokenizer_type=tokenizer.type,
        megatron_compat=compat_of(found),
    )
    with_optimizer = with_optimizer and not found.is_release
    notes = []
    if found.dist is not None:
        tensors, optimizer = read_whole(found.dist, found.first, config, with_optimizer=with_optimizer)
        notes += left_out(found.dist)
    else:
        pieces, optimizer = read_ranks(found, config, with_optimizer=with_optimizer)
        tensors = {kind: merge(places, config) for kind, places in pieces.items()}
    if optimizer is None:
        notes.append("no optimizer state is taken along: go on with --no-load-optim, or start anew with --finetune")
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
    """Whose rules ordered the data: Megatron-Core's models came with the newer ones; a checkpoint that we wrote says so
    itself.
    """
    said = found.first.args.get("megatron_compat")
    if said is not None:
        return said
    return 2026 if found.is_core else 2022


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
    model = config.model
    if model.num_attention_heads % found.tp or model.num_layers % (found.pp * len(found.first.chunks)):
        raise CheckpointError(f"{found.folder}: its heads or layers cannot be cut into {found.tp} × {found.pp} ranks")
    pieces: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    optimizers: dict[tuple[int, int], OptimizerState | None] = {}
    heads = model.num_attention_heads // found.tp
    for (t, p), file in sorted(found.ranks.items()):
        local: dict[str, LocalParameter] = {}  # in the order of the file, which is that of the optimizer
        kinds: dict[str, dict[str, LazyTensor]] = {MODEL: {}}
        for number, chunk in enumerate(file.chunks):
            layers = layers_of_chunk(model.num_layers, found.pp, len(file.chunks), p, number)
            tensors, places = read_chunk(file, chunk, config, Axis(found.tp, t), layers, is_only_stage=found.pp == 1)
            kinds[MODEL] |= tensors
            local |= places
        if with_optimizer:
            state = optimizers[t, p] = read_optimizer(file, local)
            kinds |= state.tensors if state else {}
        for kind, named in kinds.items():
            for name, tensor in named.items():
                tensor = in_our_order(name, tensor, version=file.version, heads=heads)
                pieces[kind][name].append(Place(t, local[name].spec, file.path, f"{kind}.{name}", tensor))
    return pieces, agreed(found, optimizers)


def read_chunk(
    file: RankFile, chunk: Mapping[str, Any], config: Config, tensor: Axis, layers: range, *, is_only_stage: bool
) -> tuple[dict[str, LazyTensor], dict[str, LocalParameter]]:
    """The tensors of one rank's layers under our names, in the file's order, and where they lie.

    Raises:
        CheckpointError: a tensor has no place, is missing or of another size.
    """
    flat = flatten(chunk)
    if is_only_stage and any(name in HEADS for name in flat):
        raise CheckpointError(f"{file.path} holds a head of its own; only one tied to the words is supported")
    ends = {"is_first": layers.start == 0, "is_last": layers.stop == config.model.num_layers}
    expected = parameters_of(config, layers=layers, tensor=tensor, **ends)
    tensors = match(flat, partial(our_name, first_layer=layers.start), expected, where=file.path)
    check_shapes(
        {name: found.shape for name, found in tensors.items()},
        {name: place.shape for name, place in expected.items()},
        where=file.path,
    )
    return tensors, {name: expected[name] for name in tensors}


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


def merge(places: Mapping[str, list[Place]], config: Config) -> dict[str, LazyTensor]:
    """Whole tensors from the ranks' pieces. What several ranks hold alike must be alike, the tied head included.

    Raises:
        CheckpointError: it is not.
    """
    tensors = {}
    for name, shape in global_shapes(config).items():
        pieces: dict[int, Place] = {}  # by tensor-parallel rank; of what all hold alike the first is taken
        for place in sorted(places[name], key=lambda place: place.spec.is_tied_copy):
            first = pieces.setdefault(place.tensor_rank if place.spec.is_sharded else 0, place)
            if first is not place and not is_equal(first.tensor, place.tensor):
                raise unequal(first, place)
        if len(pieces) == 1 and pieces[0].tensor.shape == shape:
            tensors[name] = pieces[0].tensor
        else:
            tensors[name] = assemble(shape, [(place.spec.offsets, place.tensor) for place in pieces.values()])
    return tensors


def unequal(one: Place, other: Place) -> CheckpointError:
    return CheckpointError(f"{one.name} in {one.path} and in {other.path} must hold the same values and do not")
