"""Which layers live where."""

from __future__ import annotations

import pytest
import torch

from tests.config.train_line import LINE, make_files, read
from trimegatron.mesh import Axis
from trimegatron.model.build import model_spec, stage_layers
from trimegatron.model.gpt import GPTChunks, GPTStage
from trimegatron.pipeline_parallel.partition import partition_layers
from trimegatron.tensor_parallel.parameter import spec_of


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "uneven", "sizes"),
    [
        (12, 4, {}, [3, 3, 3, 3]),
        (10, 4, {"first": 2, "last": 2}, [2, 3, 3, 2]),
        (9, 4, {"first": 3}, [3, 2, 2, 2]),
        (7, 4, {"last": 1}, [2, 2, 2, 1]),
        (5, 2, {"first": 2, "last": 3}, [2, 3]),
        (5, 2, {"last": 1}, [4, 1]),
    ],
)
def test_partition(num_layers: int, num_stages: int, uneven: dict, sizes: list[int]):
    stages = partition_layers(num_layers, num_stages, **uneven)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_chunks_have_the_names_of_the_whole(tmp_path, monkeypatch):
    """Two ranks with two interleaved stages each: together the parameters of one stage, by the same names; the word
    table twice.
    """
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    pipeline = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8"
    config = read(f"--num-layers 4 {pipeline}", line=LINE, world_size=2, without="--num-layers").config
    spec = model_spec(config, tensor=Axis(), device=torch.device("meta"))
    layers = stage_layers(config)
    assert layers == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    stages = [GPTStage(spec, layers[i], is_first=i == 0, is_last=i == 3) for i in range(4)]
    ranks = [dict(GPTChunks(stages[rank::2]).named_parameters()) for rank in range(2)]
    whole = dict(GPTStage(spec, range(4)).named_parameters())
    word_table = "embedding.word_embeddings.weight"
    assert ranks[0].keys() & ranks[1].keys() == {word_table}
    assert ranks[0].keys() | ranks[1].keys() == whole.keys()
    assert [spec_of(rank[word_table]).is_tied for rank in ranks] == [True, True]
    assert [spec_of(rank[word_table]).is_tied_copy for rank in ranks] == [False, True]
    assert not spec_of(whole[word_table]).is_tied
    assert spec.num_parameters == sum(torch.Size(spec_of(p).global_shape).numel() for p in whole.values())
