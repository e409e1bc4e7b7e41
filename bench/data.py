"""``trimegatron bench data``: preprocessing, index maps and samples, ours beside the libraries they stand on and
beside megatron-core's, on this machine.

Every run is a process of its own, the contenders take turns, and their results must be equal before times are told.
Times are without imports; MB are 10⁶ bytes, of JSON where they are a rate.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.bench import dataset_runs, preprocess_runs
from trimegatron.bench.corpora import (
    STDLIB_KEY,
    head,
    repeated,
    standard_library,
    trained_tokenizer,
    write_random,
    write_sparse,
)
from trimegatron.bench.measure import Contender, Figures, check_equal, in_turns, machine, median
from trimegatron.bench.results import Result, measured
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, fail, option
from trimegatron.data.index_format import bin_path, idx_path
from trimegatron.data.indexed_dataset import IndexedDataset

CASES = ("preprocess", "index", "samples")
PACKAGES = ("tokenizers", "gigatoken", "megatron-core")
CHECKED_MB = 1
PREPROCESS_RUNS, DATASET_RUNS = preprocess_runs.__name__, dataset_runs.__name__


@dataclass(frozen=True, kw_only=True)
class DataBenchConfig(Options):
    """Benchmark of the data path"""

    cases: list[str] = option(list(CASES), "what to measure", choices=CASES)
    rounds: int = option(3, "how often the contenders take turns", minimum=1)
    work_dir: str | None = option(
        None, "folder for the corpora, which stay there", derived="a temporary one", metavar="DIR"
    )
    input: str | None = option(
        None, "JSON lines to preprocess", derived="the modules of Python's standard library", metavar="FILE"
    )
    json_key: str = option(STDLIB_KEY, "key of the text in --input")
    copies: int = option(1, "how often the corpus is repeated", minimum=1)
    vocab_file: str | None = option(None, "vocab.json", derived="trained on the corpus", metavar="FILE")
    merge_file: str | None = option(None, "merges.txt", derived="trained on the corpus", metavar="FILE")
    workers: int = option(None, "processes of our preprocessing", derived="the machine's cores", minimum=1)
    slow_mb: float = option(33.0, "contenders that stand on `tokenizers` get this much of the corpus", unit="MB")
    documents: list[int] = option([10**5, 10**6, 10**7], "documents of each index build", minimum=10)
    seq_length: int = option(1024, "tokens of one sample", unit="tokens", minimum=1)
    samples: int = option(20_000, "samples read in random order", minimum=100)
    micro_batch_size: int = option(8, "samples that a loader asks for at once", unit="samples", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is None:
            self._derive(workers=os.cpu_count() or 1)
        if (self.vocab_file is None) != (self.merge_file is None):
            fail("vocab_file", self.vocab_file, "and --merge-file go together", way_out="Give both or neither.")
        for name in ("input", "vocab_file", "merge_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                fail(name, path, "must be an existing file", "there is none", "Check the path.")


def main(argv: list[str]) -> int:
    """Run the cases, print a table for each."""
    sweeps = {"documents": (10**4, 10**5, 10**6, 10**7)}
    return run("data", argv, DataBenchConfig, results, description=__doc__, sweeps=sweeps, packages=PACKAGES, show=None)


def results(config: DataBenchConfig) -> Iterator[Result]:
    """Each case, in a folder for its corpora."""
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, load {here['load_average'][0]:.1f}")
    if importlib.util.find_spec("gigatoken") is None:
        print("gigatoken is not installed: its speed will be missing")
    if not has_megatron():
        print("megatron-core is not installed, or its helper cannot be loaded: its figures will be missing")
    with ExitStack() as stack:
        work = Path(config.work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="trimegatron-bench-")))
        work.mkdir(parents=True, exist_ok=True)
        for case in dict.fromkeys(config.cases):
            print(f"\n== {case}", flush=True)
            yield from {"preprocess": preprocess, "index": index, "samples": samples}[case](config, work)


@functools.cache
def has_megatron() -> bool:
    return Contender(f"{DATASET_RUNS}:has_megatron", {}).run()["found"]


# Preprocessing


def preprocess(config: DataBenchConfig, work: Path) -> Iterator[Result]:
    """MB/s of ours with each engine, and of the engines alone."""
    given, key = config.input, config.json_key if config.input else STDLIB_KEY
    corpus = repeated(Path(given) if given else standard_library(work), config.copies, work)
    if config.vocab_file is not None and config.merge_file is not None:
        tokenizer = config.vocab_file, config.merge_file
    else:
        tokenizer = trained_tokenizer(corpus, key, work)
    check, slow = head(corpus, CHECKED_MB, work / "check.jsonl"), head(corpus, config.slow_mb, work / "slow.jsonl")
    quick = preprocess_contenders(config, check, check, key, tokenizer, work)
    check_equal(in_turns(quick, 1), "ids")
    contenders = preprocess_contenders(config, corpus, slow, key, tokenizer, work)
    figures = in_turns(contenders, config.rounds)
    for file in {corpus, slow}:
        check_equal({n: runs for n, runs in figures.items() if contenders[n].arguments["path"] == str(file)}, "ids")
    rates = {}
    for name, runs in figures.items():
        megabytes = Path(contenders[name].arguments["path"]).stat().st_size / 1e6
        rates[name] = megabytes / median(runs, "seconds")
        workers = max(run.get("largest_child_mb", 0.0) for run in runs)
        print(
            f"{name:34} {rates[name]:8.2f} MB/s {runs[0]['tokens'] / 1e6 / median(runs, 'seconds'):8.2f} Mtokens/s on "
            f"{megabytes:.1f} MB, peak {median(runs, 'peak_mb'):,.0f} MB"
            + (f" and {workers:,.0f} MB a worker" if workers else "")
        )
        about: dict[str, Any] = {"copies": config.copies, "workers": config.workers}
        note = f"{megabytes:.1f} MB"
        speeds = [megabytes / run["seconds"] for run in runs]
        yield measured("preprocess", name, "rate", "MB/s", speeds, better="higher", note=note, **about)
        yield measured("preprocess", name, "peak memory", "bytes", in_bytes(runs, "peak_mb"), note=note, **about)
    for ours, theirs in [
        ("trimegatron, tokenizers", "tokenizers alone"),
        ("trimegatron, gigatoken", "gigatoken alone, from memory"),
        ("trimegatron, gigatoken", "gigatoken alone, its own reader"),
    ]:
        if ours in rates and theirs in rates:
            print(f"{ours} at {rates[ours] / rates[theirs]:.2f} times the speed of {theirs}")


def in_bytes(runs: list[Figures], name: str) -> list[float]:
    """A figure in MB."""
    return [1e6 * run[name] for run in runs]


def preprocess_contenders(
    config: DataBenchConfig, fast: Path, slow: Path, key: str, tokenizer: tuple[str, str], work: Path
) -> dict[str, Contender]:
    """Those that stand on `tokenizers` read ``slow``, the others ``fast``."""
    common = {"key": key, "vocab_file": tokenizer[0], "merge_file": tokenizer[1]}
    ours = {"output": str(work / "ours"), "workers": config.workers}
    contenders = {}
    for engine in preprocess_runs.preprocess_engines():
        arguments = {**common, **ours, "engine": engine, "path": str(fast if engine == "gigatoken" else slow)}
        contenders[f"trimegatron, {engine or 'tokenizers'}"] = Contender(f"{PREPROCESS_RUNS}:preprocess", arguments)
    contenders["tokenizers alone"] = Contender(f"{PREPROCESS_RUNS}:raw_tokenizers", common | {"path": str(slow)})
    if importlib.util.find_spec("gigatoken") is not None:
        for name, reads_files in (("from memory", False), ("its own reader", True)):
            arguments = {**common, "path": str(fast), "reads_files": reads_files}
            contenders[f"gigatoken alone, {name}"] = Contender(f"{PREPROCESS_RUNS}:raw_gigatoken", arguments)
    return contenders


# Index maps


def index(config: DataBenchConfig, work: Path) -> Iterator[Result]:
    """Seconds and memory of the three maps, over the number of documents; the same from an open pair of files."""
    for documents in sorted(config.documents):
        common = {"documents": documents, "seq_length": config.seq_length}
        helper = f"{'megatron-core' if has_megatron() else 'NumPy'} and shuffles"
        contenders = {
            "trimegatron": Contender(f"{DATASET_RUNS}:index", common),
            helper: Contender(f"{DATASET_RUNS}:index_with_helper", common),
        }
        figures = in_turns(contenders, config.rounds)
        check_equal(figures, "samples", "document_index", "sample_index", "shuffle_index")
        figures |= open_in_turns(config, documents, work)
        print(f"{documents:,} documents, {figures['trimegatron'][0]['samples']:,} samples")
        for name, runs in figures.items():
            peak, before = median(runs, "peak_mb"), median(runs, "peak_mb_before")
            line = f"  {name:30} {median(runs, 'seconds'):8.3f} s, peak {peak:,.0f} MB, {peak - before:,.0f} of it new"
            if "sample_index_seconds" in runs[0]:
                line += f"; {median(runs, 'sample_index_seconds'):.3f} s of it for the sample index"
            print(line)
            variant, from_files, _ = name.partition(", files")
            case = "open from files" if from_files else "index maps"
            about: dict[str, Any] = {"documents": documents, "seq_length": config.seq_length}
            yield measured(case, variant, "time", "s", [run["seconds"] for run in runs], **about)
            new = [1e6 * (run["peak_mb"] - run["peak_mb_before"]) for run in runs]
            yield measured(case, variant, "memory beyond the start", "bytes", new, **about)


def open_in_turns(config: DataBenchConfig, documents: int, work: Path) -> dict[str, list[Figures]]:
    """From a pair of files and an empty cache to a dataset, ours and megatron-core's."""
    prefix = work / f"sparse-{documents}"
    sizes = dataset_runs.document_sizes(documents)
    write_sparse(prefix, sizes)
    figures: dict[str, list[Figures]] = {}
    for _ in range(config.rounds):
        for name in ("trimegatron, files", "megatron-core, files"):
            if name.startswith("megatron") and not has_megatron():
                continue
            with tempfile.TemporaryDirectory(dir=work) as cache:
                arguments = {
                    "prefix": str(prefix),
                    "seq_length": config.seq_length,
                    "samples": dataset_runs.samples_of_epochs(sizes, config.seq_length),
                    "cache": cache,
                    "eod": 0,
                    "megatron": name.startswith("megatron"),
                }
                figures.setdefault(name, []).append(Contender(f"{DATASET_RUNS}:open_dataset", arguments).run())
    check_equal(figures, "samples")
    for path in (bin_path(prefix), idx_path(prefix)):
        path.unlink()
    return figures


# Samples


def samples(config: DataBenchConfig, work: Path) -> Iterator[Result]:
    """Samples a second in random order, for long and for short documents."""
    random = np.random.default_rng(dataset_runs.SEED)
    eod = 50256
    for name, sizes in (
        ("long documents", np.maximum(1, random.lognormal(8.3, 1.25, 2000)).astype(np.int32)),
        ("short documents", random.integers(50, 501, 200_000, np.int32)),
    ):
        prefix = work / name.replace(" ", "-")
        write_random(prefix, sizes, eod + 1, random)
        with tempfile.TemporaryDirectory(dir=work) as cache:
            common = {
                "prefix": str(prefix),
                "seq_length": config.seq_length,
                "samples": config.samples,
                "cache": cache,
                "eod": eod,
            }
            ours = common | {"micro_batch_size": config.micro_batch_size}
            contenders = {"trimegatron": Contender(f"{DATASET_RUNS}:read_ours", ours)}
            if has_megatron():
                contenders["megatron-core"] = Contender(f"{DATASET_RUNS}:read_megatron", common)
            figures = in_turns(contenders, config.rounds)
        check_equal(figures, "content")
        yield from sample_results(name, figures, IndexedDataset(prefix), config)


def sample_results(
    name: str, figures: Mapping[str, list[Figures]], data: IndexedDataset, config: DataBenchConfig
) -> Iterator[Result]:
    """Rates in each way of reading, and peak memory, printed in a table."""
    print(f"{name}: {len(data):,} of {data.num_tokens / len(data):,.0f} tokens on average, L = {config.seq_length}")
    what = {
        "tokens_per_second": "tokens only",
        "one_by_one_per_second": "with labels and mask, one by one",
        "batches_per_second": f"with labels and mask, {config.micro_batch_size} at once",
        "loader_per_second": f"the same through a loader's {dataset_runs.LOADER_WORKERS} processes",
    }
    for who, runs in figures.items():
        for key, words in what.items():
            if key in runs[0]:
                print(f"  {who:14} {median(runs, key):10,.0f} samples/s {words}")
                rates = [run[key] for run in runs]
                case = f"read {name}, {words}"
                yield measured(case, who, "rate", "samples/s", rates, better="higher", seq_length=config.seq_length)
        print(f"  {who:14} peak {median(runs, 'peak_mb'):,.0f} MB")
        peaks = in_bytes(runs, "peak_mb")
        yield measured(f"read {name}", who, "peak memory", "bytes", peaks, seq_length=config.seq_length)
    if "megatron-core" in figures:
        theirs = median(figures["megatron-core"], "one_by_one_per_second")
        one, many = (median(figures["trimegatron"], f"{how}_per_second") / theirs for how in ("one_by_one", "batches"))
        print(f"  {one:.1f} times megatron-core's speed one by one, {many:.1f} times in micro-batches")
