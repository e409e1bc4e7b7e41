"""The files of a Megatron-LM checkpoint: one of ``torch.save``'s for each tensor- and pipeline-parallel rank, or
torch_dist's, in which the tensors are whole (``torch_dist.py``).

::

    latest_checkpointed_iteration.txt
    iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt        (model_rng.pt beside a distributed optimizer)
    iter_0000100/{.metadata, metadata.json, *.distcp}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimegatron.checkpoint.directory import TRACKER, checkpoint_folder
from trimegatron.convert.torch_dist import FORM, METADATA, TorchDist, read_torch_dist
from trimegatron.convert.torch_file import Inert, read_torch_file
from trimegatron.errors import CheckpointError

RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
FILES = ("model_optim_rng.pt", "model_rng.pt")
RELEASE = "release"
"""The tracker's word and the folder's name for weights that no run goes on from: iteration 0, no optimizer."""


@dataclass(frozen=True)
class RankFile:
    """What one rank saved."""

    path: Path
    content: Mapping[str, Any]

    @property
    def args(self) -> dict[str, Any]:
        return vars(self.content["args"])

    @property
    def version(self) -> float:
        return float(self.content.get("checkpoint_version", 0))

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """The models: one, or with interleaved stages several."""
        if "model" in self.content:
            return [self.content["model"]]
        count = sum(re.fullmatch(r"model\d+", name) is not None for name in self.content)
        return [self.content[f"model{i}"] for i in range(count)]


@dataclass(frozen=True)
class MegatronFiles:
    """All ranks of one checkpoint."""

    folder: Path
    ranks: dict[tuple[int, int], RankFile]
    """By tensor- and pipeline-parallel rank; of torch_dist the one holds what all ranks hold alike, and no model."""
    tp: int
    pp: int
    dist: TorchDist | None = None
    """The tensors, where the checkpoint is of torch_dist."""

    @property
    def first(self) -> RankFile:
        return self.ranks[0, 0]

    @property
    def is_release(self) -> bool:
        return self.folder.name == RELEASE

    @property
    def is_core(self) -> bool:
        """Whether the model is one of Megatron-Core's, which the names of its parameters tell."""
        return not any("language_model" in chunk for chunk in self.first.chunks)


def is_megatron(root: Path) -> bool:
    """Whether a folder looks like one of Megatron-LM's checkpoints or holds one."""
    folders = [root, *root.glob("iter_*"), root / RELEASE]
    return any(any(folder.glob("mp_rank_*")) or (folder / METADATA).exists() for folder in folders)


def read_megatron_files(root: Path, ckpt_step: int | None = None) -> MegatronFiles:
    """The checkpoint that the tracker names, that of ``ckpt_step``, or the one that ``root`` itself is.

    Raises:
        CheckpointError: there is none, a rank is missing, a file is damaged, or the files are not of one checkpoint.
    """
    folder = find_iteration(root, ckpt_step)
    if (folder / METADATA).exists() or (folder / FORM).exists():
        dist = read_torch_dist(folder)
        common = RankFile(folder / METADATA, with_args(dist.common(), folder))
        return MegatronFiles(folder, {(0, 0): common}, *layout(common.args), dist)
    found: dict[tuple[int, int], RankFile] = {}
    for path in sorted(path for name in FILES for path in folder.glob(f"mp_rank_*/{name}")):
        rank = RANK.fullmatch(path.parent.name)
        if rank is None:
            raise CheckpointError(f"{path.parent} is not named as a rank of Megatron-LM is")
        place = int(rank[1]), int(rank[2] or 0)
        if place in found:
            raise CheckpointError(f"{path} and {found[place].path} are of the same rank")
        found[place] = RankFile(path, read_rank_file(path))
    if not found:
        raise CheckpointError(f"{folder} holds no mp_rank_*/{FILES[0]}")
    tp, pp = layout(found[min(found)].args)
    expected = {(t, p) for t in range(tp) for p in range(pp)}
    if found.keys() != expected:
        missing = ", ".join(str(place) for place in sorted(expected - found.keys())) or "none"
        more = ", ".join(str(place) for place in sorted(found.keys() - expected)) or "none"
        raise CheckpointError(
            f"{folder} was saved by {tp} × {pp} (tensor × pipeline) ranks and holds {len(found)}; missing: {missing}, "
            f"too many: {more}"
        )
    for name in ("iteration", "checkpoint_version"):
        values = {str(file.path.parent.name): file.content.get(name) for file in found.values()}
        if len(set(values.values())) > 1:
            raise CheckpointError(f"{folder} mixes checkpoints: {name} is {values}")
    return MegatronFiles(folder, found, tp, pp)


def layout(args: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size of the run."""
    return (
        args.get("tensor_model_parallel_size", args.get("model_parallel_size", 1)),
        args.get("pipeline_model_parallel_size", 1),
    )


def read_rank_file(path: Path) -> Mapping[str, Any]:
    content = with_args(read_torch_file(path), path)
    if "model" not in content and "model0" not in content:
        raise CheckpointError(f"{path} holds no model")
    return content


def with_args(content: Any, path: Path) -> Mapping[str, Any]:
    """``content``, if it is what a training run saves. Raises CheckpointError."""
    if not isinstance(content, Mapping) or not isinstance(content.get("args"), Inert):
        raise CheckpointError(f"{path} holds no args; it is not a training checkpoint of Megatron-LM's")
    return content


def find_iteration(root: Path, ckpt_step: int | None) -> Path:
    """The folder of one checkpoint under ``root``. Raises CheckpointError."""
    if not root.is_dir():
        raise CheckpointError(f"--load ({root}) does not exist. Give the folder that Megatron-LM saved into")
    if ckpt_step is None and (any(root.glob("mp_rank_*")) or (root / METADATA).exists()):
        return root
    if ckpt_step is not None:
        folder = checkpoint_folder(root, ckpt_step)
    else:
        try:
            text = (root / TRACKER).read_text().strip()
            folder = root / RELEASE if text == RELEASE else checkpoint_folder(root, int(text))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"--load ({root}) has no {TRACKER} that can be read ({error}). Give --ckpt-step, or the folder of one "
                "checkpoint"
            ) from error
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist. Give --ckpt-step with one that does")
    return folder
