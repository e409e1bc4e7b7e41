"""Which shapes are tuned: those of a model, one that is given, or the usual ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimegatron.bench.kernel_cases import GROUPS
from trimegatron.bench.tuning.targets import Work
from trimegatron.config import Config, read_train_args
from trimegatron.config.options import fail
from trimegatron.mesh import Axis
from trimegatron.model.build import model_spec
from trimegatron.tensor_parallel.embedding import padded_vocab_size

ROWS = 8192
_HIDDEN_SIZES = (768, 1024, 2048, 4096, 8192)
_VOCABULARIES = (32000, 50304, 131072)
_KEYS = (1024, 2048, 4096)
_PARAMETERS = 100_000_000
_MOST_PARAMETERS = 1_000_000_000  # of one timing: beyond it nothing changes
_NORMS = ("norm_cases", "add_norm_cases", "dropout_cases")
_NAMES = tuple(group.__name__ for group in GROUPS)


def usual(dtype: str) -> list[Work]:
    """8192 tokens at common widths, lengths and vocabularies."""
    works = [Work(name, ROWS, hidden, dtype) for hidden in _HIDDEN_SIZES for name in (*_NORMS, "gelu_cases")]
    works += [Work("gelu_cases", ROWS, 4 * _HIDDEN_SIZES[-1], dtype)]
    works += [Work("cross_entropy_cases", ROWS, words, dtype) for words in _VOCABULARIES]
    works += [Work("softmax_cases", ROWS, keys, dtype) for keys in _KEYS]
    works += [Work("flash_cases", ROWS, 16 * size, dtype, size) for size in (64, 128)]
    return [*works, Work("optimizer_cases", 1, _PARAMETERS, dtype)]


def of_shape(text: str, dtype: str) -> list[Work]:
    """Every op at "rows=R,hidden=H"; hidden is what a row holds: features, keys, words.

    Raises:
        ConfigError: it is not of this form.
    """
    way_out = "Write --shape rows=8192,hidden=4096, both from 1 on, rows a multiple of 16."
    values = dict(part.partition("=")[::2] for part in text.split(","))
    if set(values) != {"rows", "hidden"} or not all(value.isdecimal() for value in values.values()):
        fail("shape", text, "must hold rows and hidden, whole numbers", way_out=way_out)
    rows, hidden = int(values["rows"]), int(values["hidden"])
    if rows < 1 or rows % 16 or hidden < 1:
        fail("shape", text, "must have rows that are a positive multiple of 16, and a hidden size", way_out=way_out)
    return [*(Work(name, rows, hidden, dtype) for name in _NAMES), Work("optimizer_cases", rows, hidden, dtype)]


def of_model(flags: Sequence[str]) -> tuple[list[Work], list[str]]:
    """What one rank of the run that a training command line describes launches; and what was assumed.

    Raises:
        ConfigError: as training's.
    """
    from trimegatron.dry_run import assume_vocabulary  # with it comes all that a run is made of

    command = read_train_args([*flags, "--dry-run"], world_size=1)
    config, notes = assume_vocabulary(command.config)
    return works_of(config), notes


def works_of(config: Config) -> list[Work]:
    """The cases at the sizes of one rank. Rows are rounded down to the batch of the cases."""
    model, parallel, dtype = config.model, config.parallel, config.precision.params_dtype
    tensor, length = parallel.tensor_model_parallel_size, config.data.seq_length
    tokens = length * config.training.micro_batch_size
    between = tokens // tensor if parallel.sequence_parallel else tokens  # the regions of tensor parallelism
    heads = model.num_attention_heads // tensor
    assert model.vocab_size is not None, "assumed by now"
    words = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, tensor) // tensor
    works = [Work(name, _whole(between), model.hidden_size, dtype) for name in _NORMS]
    works += [Work("gelu_cases", _whole(tokens), model.ffn_hidden_size // tensor, dtype)]
    works += [Work("cross_entropy_cases", _whole(tokens), words, dtype)]
    if model.attention_backend == "softmax":
        works += [Work("softmax_cases", heads * tokens, length, dtype)]
    elif model.attention_dropout > 0:
        works += [Work("flash_cases", length, model.kv_channels * heads, dtype, model.kv_channels)]
    parameters = model_spec(config, tensor=Axis(), device=torch.device("meta")).num_parameters
    share = tensor * parallel.pipeline_model_parallel_size
    share *= parallel.data_parallel_size if parallel.use_distributed_optimizer else 1
    return [*works, Work("optimizer_cases", 1, max(1, min(_MOST_PARAMETERS, parameters // share)), dtype)]


def _whole(rows: int) -> int:
    return max(16, rows // 16 * 16)
