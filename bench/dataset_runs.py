"""The index and sample runs of ``trimegatron bench data``, each made for a process of its own: ours and the others'.

Each does its imports, loads what is not to be timed, times, and returns seconds, peak memory and a sha256 of the
result.
"""

from __future__ import annotations

import hashlib
import importlib
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from trimegatron.bench.measure import Figures, peak_memory, sha256
from trimegatron.data.indices import Epochs, build_indices

SEED = 1234
EPOCHS = 3
LOADER_WORKERS = 2


# Index maps


def document_sizes(documents: int) -> np.ndarray:
    """int32 [documents], 50 to 2000 tokens each."""
    return np.random.default_rng(SEED).integers(50, 2001, documents, np.int32)


def samples_of_epochs(sizes: np.ndarray, seq_length: int) -> int:
    """As many samples as ``EPOCHS`` whole epochs hold."""
    return (EPOCHS * int(sizes.sum(dtype=np.int64)) - 1) // seq_length


def index(documents: int, seq_length: int) -> Figures:
    """Ours: the three maps."""
    sizes = document_sizes(documents)
    num_samples = samples_of_epochs(sizes, seq_length)
    before = peak_memory()["peak_mb"]
    started = time.perf_counter()
    epochs = Epochs.plan(int(sizes.sum(dtype=np.int64)), seq_length, num_samples)
    maps = build_indices(sizes, (0, documents), seq_length, epochs, SEED)
    seconds = time.perf_counter() - started
    figures: Figures = {"seconds": seconds, **peak_memory(), "peak_mb_before": before, "samples": num_samples}
    return figures | {name: sha256(values) for name, values in maps._asdict().items()}


def index_with_helper(documents: int, seq_length: int) -> Figures:
    """The same maps from NumPy's two shuffles and megatron-core's compiled helper; without it, by a search."""
    sizes = document_sizes(documents)
    num_samples = samples_of_epochs(sizes, seq_length)
    tokens = int(sizes.sum(dtype=np.int64))
    helper = megatron_helper()
    before = peak_memory()["peak_mb"]
    started = time.perf_counter()
    random = np.random.RandomState(SEED)
    document_index = np.tile(np.arange(documents, dtype=np.int32), EPOCHS)
    random.shuffle(document_index)
    shuffled = time.perf_counter()
    if helper is not None:
        sample_index = helper(sizes, document_index, seq_length, EPOCHS, tokens)
    else:
        ends = sizes[document_index].cumsum(dtype=np.int64)
        begins = np.arange(num_samples + 1) * seq_length
        position = np.searchsorted(ends, begins, side="right")
        sample_index = np.stack([position, begins - ends[position] + sizes[document_index[position]]], axis=1)
        sample_index = sample_index.astype(np.int32)
    found = time.perf_counter()
    shuffle_index = np.arange(num_samples, dtype=np.uint32)
    random.shuffle(shuffle_index)
    figures: Figures = {"seconds": time.perf_counter() - started, "sample_index_seconds": found - shuffled}
    figures |= {**peak_memory(), "peak_mb_before": before, "samples": num_samples}
    maps = {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}
    return figures | {name: sha256(values) for name, values in maps.items()}


def megatron_helper() -> Callable[..., np.ndarray] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("megatron.core.datasets.helpers").build_sample_idx
        except ImportError:
            return None


def has_megatron() -> Figures:
    """Whether megatron-core is installed with its compiled helper; asked of a process of its own, for it is large."""
    return {"found": megatron_helper() is not None}


# Samples


def open_ours(prefix: str, seq_length: int, samples: int, cache: str) -> Any:
    from trimegatron.data.gpt_dataset import build_gpt_datasets

    dataset, _, _ = build_gpt_datasets(
        prefix,
        split="1,0,0",
        seq_length=seq_length,
        seed=SEED,
        num_samples=(samples, 0, 0),
        cache_dir=cache,
        log=lambda _: None,
    )
    assert dataset is not None
    return dataset


def open_megatron(prefix: str, seq_length: int, samples: int, cache: str, eod: int) -> Any:
    """megatron-core's dataset of the same samples, with labels and loss mask, without an attention mask."""
    warnings.simplefilter("ignore")
    builder = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    gpt = importlib.import_module("megatron.core.datasets.gpt_dataset")
    tokenizer = SimpleNamespace(
        eod=eod, pad=-2, bos_token_id=None, vocab_size=eod + 1, unique_identifiers={}, special_tokens_dict={}
    )
    config = gpt.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        create_attention_mask=False,
    )
    build = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, [samples, 0, 0], lambda: True, config).build
    return build()[0]


def open_dataset(prefix: str, seq_length: int, samples: int, cache: str, eod: int, megatron: bool) -> Figures:
    """From a pair of files and an empty cache to a dataset that is ready to be read."""
    if megatron:
        megatron_helper()
    else:
        importlib.import_module("trimegatron.data.gpt_dataset")
    before = peak_memory()["peak_mb"]
    started = time.perf_counter()
    dataset = (
        open_megatron(prefix, seq_length, samples, cache, eod)
        if megatron
        else open_ours(prefix, seq_length, samples, cache)
    )
    seconds = time.perf_counter() - started
    return {"seconds": seconds, **peak_memory(), "peak_mb_before": before, "samples": len(dataset)}


def read_ours(prefix: str, seq_length: int, samples: int, cache: str, eod: int, micro_batch_size: int) -> Figures:
    """Samples a second in random order: tokens alone, with labels and mask one by one and as micro-batches, and
    through a loader's processes, once they run.
    """
    from trimegatron.data.boundaries import DocumentBoundaries
    from trimegatron.data.loader import build_loader, make_batch, read_samples

    dataset = open_ours(prefix, seq_length, samples, cache)
    boundaries = DocumentBoundaries(eod, eod_mask_loss=True)
    order = random_order(len(dataset), samples)
    starts = range(0, len(order) - micro_batch_size + 1, micro_batch_size)

    def tokens_only() -> None:
        for i in order:
            dataset[i]

    def one_by_one() -> None:
        for i in order:
            make_batch(dataset[i][None], [i], boundaries)

    def micro_batches() -> None:
        for start in starts:
            indices = order[start : start + micro_batch_size]
            make_batch(read_samples(dataset, indices), indices, boundaries)

    loader = build_loader(
        dataset,
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=LOADER_WORKERS,
        boundaries=boundaries,
    )

    def from_loader() -> None:
        for _ in range(len(starts) // 2):
            next(loader)

    check = [make_batch(dataset[i][None], [i], boundaries) for i in order[:100]]
    figures: Figures = {"content": content([(b.tokens[0], b.labels[0], b.loss_mask[0]) for b in check])}
    figures["stream"] = check_against_stream(dataset, order[:100])
    figures |= {
        "tokens_per_second": len(order) / timed(tokens_only),
        "one_by_one_per_second": len(order) / timed(one_by_one),
        "batches_per_second": len(starts) * micro_batch_size / timed(micro_batches),
        "loader_per_second": len(starts) // 2 * micro_batch_size / timed(from_loader),
    }
    return figures | peak_memory()


def read_megatron(prefix: str, seq_length: int, samples: int, cache: str, eod: int) -> Figures:
    """megatron-core's ``__getitem__``."""
    dataset = open_megatron(prefix, seq_length, samples, cache, eod)
    order = random_order(len(dataset), samples)

    def one_by_one() -> None:
        for i in order:
            dataset[i]

    check = [dataset[i] for i in order[:100]]
    figures: Figures = {"content": content([(item["tokens"], item["labels"], item["loss_mask"]) for item in check])}
    return figures | {"one_by_one_per_second": len(order) / timed(one_by_one)} | peak_memory()


def timed(function: Callable[[], None]) -> float:
    """Seconds of the second call: the first brings the pages in."""
    function()
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def random_order(length: int, count: int) -> list[int]:
    return np.random.default_rng(SEED).permutation(length)[:count].tolist()


def content(samples: list[tuple[Any, Any, Any]]) -> str:
    """sha256 of tokens, labels and loss masks."""
    digest = hashlib.sha256()
    for tokens, labels, mask in samples:
        digest.update(tokens.numpy().astype("<i8").tobytes() + labels.numpy().astype("<i8").tobytes())
        digest.update(mask.numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def check_against_stream(dataset: Any, indices: list[int]) -> str:
    """Each sample is its L + 1 tokens of the documents laid end to end. Raises AssertionError."""
    maps, data, length = dataset.indices, dataset.data, dataset.seq_length
    documents = np.asarray(maps.document_index)
    ends = data.sizes[documents].cumsum(dtype=np.int64)
    for i in indices:
        begin = int(maps.shuffle_index[i]) * length
        first, last = np.searchsorted(ends, [begin, begin + length], side="right")
        run = np.concatenate([data.get(int(document)) for document in documents[first : last + 1]])
        skipped = begin - (int(ends[first]) - int(data.sizes[documents[first]]))
        assert np.array_equal(run[skipped : skipped + length + 1], dataset[i]), f"sample {i}"
    return f"{len(indices)} samples checked"
