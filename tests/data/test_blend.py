"""Blends: Megatron's arrays, the rule itself on random weights, and what is promised of every mixture."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimegatron.config.blend import Blend
from trimegatron.data import blend_indices as blend_indices_module
from trimegatron.data.blend_indices import blend_by_sizes, blend_by_weights
from trimegatron.data.blended_dataset import BlendedDataset, build_splits
from trimegatron.data.gpt_dataset import GPTDataset, GPTDatasetBuilder, build_gpt_datasets
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "blend"
CASES = [name for name in json.loads((GOLDEN / "manifest.json").read_text()) if (GOLDEN / f"{name}.npz").exists()]


@pytest.mark.parametrize("name", CASES)
def test_equals_megatron(name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    if "sizes" in golden:
        maps = blend_by_sizes(golden["sizes"])
    else:
        maps = blend_by_weights(golden["weights"], len(golden["dataset_index"]))
    for field, array in maps._asdict().items():
        assert array.dtype == golden[field].dtype, field
        np.testing.assert_array_equal(array, golden[field], err_msg=field)


def by_the_rule(weights: list[float], length: int) -> tuple[list[int], list[int]]:
    """Step by step, as the rule is written."""
    total = float(np.sum(np.array(weights)))
    shares = [weight / total for weight in weights]
    counts, sets, samples = [0] * len(weights), [], []
    for i in range(length):
        errors = [
            share * max(i, 1) - count if share > 0 else -np.inf for share, count in zip(shares, counts, strict=True)
        ]
        chosen = errors.index(max(errors))
        sets.append(chosen)
        samples.append(counts[chosen])
        counts[chosen] += 1
    return sets, samples


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.sampled_from([0.1, 0.5, 1.0, 3.0])), min_size=1, max_size=12
    ).filter(any),
    length=st.integers(0, 1200),
    steps=st.sampled_from([4, 8, 32]),
    rounds=st.integers(1, 3),
)
def test_lanes_side_by_side_are_the_rule(weights: list[float], length: int, steps: int, rounds: int) -> None:
    """Short lanes and few rounds, so that guesses are often wrong, lanes run again and the last resort is taken."""
    usual = blend_indices_module._STEPS, blend_indices_module._ROUNDS
    blend_indices_module._STEPS, blend_indices_module._ROUNDS = steps, rounds
    try:
        maps = blend_by_weights(np.array(weights), length)
    finally:
        blend_indices_module._STEPS, blend_indices_module._ROUNDS = usual
    sets, samples = by_the_rule(weights, length)
    assert maps.dataset_index.tolist() == sets
    assert maps.dataset_sample_index.tolist() == samples


def test_lanes_of_the_usual_length_are_the_rule() -> None:
    weights = np.random.default_rng(1).pareto(0.7, 40) + 0.01
    maps = blend_by_weights(weights, 9000)
    sets, samples = by_the_rule(weights.tolist(), 9000)
    assert maps.dataset_index.tolist() == sets
    assert maps.dataset_sample_index.tolist() == samples


@pytest.mark.parametrize("weights", [[0.0, 0.5, 0.5], [0.0, 0.3, 0.0, 0.7], [0, 1, 0]])
def test_a_set_of_weight_0_is_never_taken(weights: list[float]) -> None:
    assert set(blend_by_weights(np.array(weights), 3000).dataset_index.tolist()) == set(np.flatnonzero(weights))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any))
def test_by_sizes_every_sample_comes_once(sizes: list[int]) -> None:
    maps = blend_by_sizes(np.array(sizes))
    drawn = sorted(zip(maps.dataset_index.tolist(), maps.dataset_sample_index.tolist(), strict=True))
    assert drawn == [(d, k) for d, size in enumerate(sizes) for k in range(size)]


def write(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Documents whose tokens tell where they come from."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length), [length])
            first += length
    return str(prefix)


def build(
    blends: dict[str, Blend] | Blend,
    needed: int | dict[str, int],
    lines: list[str] | None = None,
    *,
    split: str = "1,0,0",
    seq_length: int = 4,
    compat: int = 2026,
    cache_dir: Path | None = None,
) -> dict[str, GPTDataset | BlendedDataset | None]:
    log = (lines if lines is not None else []).append
    builder = GPTDatasetBuilder(seq_length, 1, compat, cache_dir=cache_dir, log=log)
    num_samples = {"train": needed} if isinstance(needed, int) else needed
    return build_splits(
        {"data": blends} if isinstance(blends, Blend) else blends, split=split, num_samples=num_samples, builder=builder
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sets=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=2, max_size=6).filter(
        lambda sets: sum(weight for _, weight in sets) > 1e-3
    ),
    needed=st.integers(1, 120),
    compat=st.sampled_from([2022, 2026]),
)
def test_never_more_drawn_than_built(
    tmp_path_factory: pytest.TempPathFactory, sets: list[tuple[int, float]], needed: int, compat: int
) -> None:
    """With sets from a single token on: every sample can be read, the number needed is there, and after each step
    every set has its share to within the number of sets.
    """
    folder = tmp_path_factory.mktemp("blend")
    prefixes = tuple(write(folder / str(k), [tokens]) for k, (tokens, _) in enumerate(sets))
    blend = Blend(prefixes, tuple(weight for _, weight in sets))
    mixed = build(blend, needed, compat=compat, cache_dir=folder / "cache")["train"]
    assert isinstance(mixed, BlendedDataset)
    assert len(mixed) >= needed
    for i in range(len(mixed)):
        assert len(mixed[i]) == 5
    total = sum(weight for _, weight in sets)
    for d, count in enumerate(np.bincount(mixed.indices.dataset_index[:needed], minlength=len(sets)).tolist()):
        share = sets[d][1] / total
        assert count <= share * needed + 1 + 1e-9
        assert len(mixed.datasets[d] or []) >= count
        assert share > 0 or count == 0


def test_mixture_is_made_of_the_sets_samples(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [7] * 20), write(tmp_path / "b", [5] * 30, 1000)
    lines: list[str] = []
    mixed = build(Blend((a, b), (3.0, 1.0)), 40, lines)["train"]
    assert isinstance(mixed, BlendedDataset)
    alone = [
        build_gpt_datasets(prefix, split="1,0,0", seq_length=4, seed=1, num_samples={"train": n}, log=lambda _: None)[0]
        for prefix, n in ((a, 31), (b, 11))  # ceil(ceil(40 · 0.75) · 1.005) and so on
    ]
    sets, samples = by_the_rule([3, 1], 40)
    for i, (d, k) in enumerate(zip(sets, samples, strict=True)):
        np.testing.assert_array_equal(mixed[i], alone[d][k])  # type: ignore[index]
    together = mixed.__getitems__(range(40))  # type: ignore[arg-type]
    np.testing.assert_array_equal(together, [mixed[i] for i in range(40)])
    np.testing.assert_array_equal(mixed.__getitems__([7, 3]), [mixed[7], mixed[3]])
    with pytest.raises(IndexError, match="samples 0 to 99 of 40"):
        mixed.__getitems__([0, 99])
    assert mixed.sources(np.arange(40)) == {a: 30, b: 10}
    assert lines[0].startswith("train: a blend of 2 sets, 40 samples of 4 tokens needed")
    assert lines[1].startswith(f"  0.75 from {a}: 30 samples, 0.8571 epochs of 20 documents")
    assert lines[2].startswith(f"  0.25 from {b}: 10 samples, 0.2667 epochs of 30 documents")


def test_pickled_mixture_maps_its_files_again(tmp_path: Path) -> None:
    prefixes = tuple(write(tmp_path / name, [50] * 40) for name in "ab")
    mixed = build(Blend(prefixes, (1.0, 1.0)), 3000)["train"]
    assert mixed is not None
    pickled = pickle.dumps(mixed)
    assert len(pickled) < 4000
    np.testing.assert_array_equal(pickle.loads(pickled)[77], mixed[77])


def test_300_sets_and_extreme_weights(tmp_path: Path) -> None:
    prefixes = tuple(write(tmp_path / str(k), [9], 10 * k) for k in range(300))
    for weights, compat in (((0.9,) + (0.1 / 299,) * 299, 2026), ((1.0,) * 300, 2022)):
        mixed = build(Blend(prefixes, weights), 301, compat=compat, cache_dir=tmp_path / "cache")["train"]
        assert isinstance(mixed, BlendedDataset)
        assert mixed.indices.dataset_index.dtype == np.int16
        for i in range(len(mixed)):
            assert len(np.unique(mixed[i] // 10)) == 1
    equal = tuple(write(tmp_path / f"equal{k}", [9] * 3) for k in range(2))
    mixed = build(Blend(equal, (0.001, 0.999)), 1500)["train"]
    assert isinstance(mixed, BlendedDataset)
    assert mixed.sources(np.arange(1500)) == {equal[0]: 2, equal[1]: 1498}


def test_a_set_against_itself(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [9] * 10)
    mixed = build(Blend((a, a), (0.5, 0.5)), 30)["train"]
    assert mixed is not None
    assert mixed.sources(np.arange(30)) == {a: 30}
    np.testing.assert_array_equal(mixed[0], mixed[1])


def test_a_set_of_weight_0_is_not_even_opened(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [9] * 10)
    mixed = build(Blend((str(tmp_path / "nowhere"), a), (0.0, 1.0)), 7)["train"]
    assert isinstance(mixed, BlendedDataset)
    assert mixed.indices.dataset_index.tolist() == [1] * 7


def test_without_weights_sizes_decide_and_each_sample_comes_once(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [13]), write(tmp_path / "b", [21], 100)  # 3 and 5 samples of 4
    lines: list[str] = []
    mixed = build(Blend((a, b), None), 8, lines)["train"]
    assert isinstance(mixed, BlendedDataset)
    golden = np.load(GOLDEN / "ex_3_5.npz")
    np.testing.assert_array_equal(mixed.indices.dataset_index, golden["dataset_index"])
    np.testing.assert_array_equal(mixed.indices.dataset_sample_index, golden["dataset_sample_index"])
    more = build(Blend((a, b), None), 16, lines)["train"]
    assert more is not None
    assert more.sources(np.arange(16)) == {a: 6, b: 10}
    assert any("hold 8 samples and 16 are needed" in line for line in lines)


def test_a_set_shorter_than_a_sample(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [3]), write(tmp_path / "b", [21], 100)
    lines: list[str] = []
    mixed = build(Blend((a, b), (0.5, 0.5)), 6, lines)["train"]
    assert mixed is not None
    assert mixed.sources(np.arange(6)) == {a: 3, b: 3}
    assert any(f"from {a}: 3 samples, 4 epochs" in line for line in lines)
    mixed = build(Blend((a, b), None), 5, lines)["train"]
    assert mixed is not None
    assert mixed.sources(np.arange(5)) == {a: 0, b: 5}
    assert any(f"{a} holds 3 tokens, less than one sample" in line for line in lines)
    mixed = build(Blend((a, a), None), 5, lines)["train"]  # no set holds a whole sample
    assert mixed is not None
    assert len(mixed[4]) == 5


def test_an_empty_part_of_a_split(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [9] * 10), write(tmp_path / "b", [9], 500)
    lines: list[str] = []
    built = build(Blend((a, b), (0.5, 0.5)), {"train": 4, "valid": 6}, lines, split="9,1,0")
    valid = built["valid"]
    assert isinstance(valid, BlendedDataset)
    assert valid.sources(np.arange(6)) == {a: 6}
    assert built["test"] is None
    assert any(f"{b}: --split 9,1,0 over 1 documents leaves its valid split no documents" in line for line in lines)
    with pytest.raises(DataError, match=r"leaves its train split no documents.*weight 0"):
        build(Blend((a, b), (0.5, 0.5)), 4, split="1,9,0")
    with pytest.raises(DataError, match="every set's valid split without a token, but 2 samples"):
        build(Blend((b, b), (0.5, 0.5)), {"train": 4, "valid": 2}, split="9,1,0")
    lines.clear()
    built = build(Blend((b, b), (0.5, 0.5)), {"train": 4, "valid": 2}, lines, split="9,1,0", compat=2022)
    assert built["valid"] is None
    assert any("going on without a valid set" in line for line in lines)


def test_each_split_from_its_own_sets(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, [9] * 4, first) for name, first in (("a", 0), ("b", 100), ("c", 200)))
    blends = {"train": Blend((a, b), (1.0, 1.0)), "valid": Blend((c,), None)}
    built = build(blends, {"train": 12, "valid": 5, "test": 5})
    train, valid = built["train"], built["valid"]
    assert train is not None
    assert valid is not None
    assert built["test"] is None
    assert np.max([train[i] for i in range(12)]) < 200
    assert np.min([valid[i] for i in range(5)]) >= 200
    assert len({int(token) for i in range(8) for token in valid[i]}) > 30  # all documents, there is no split


def test_2022_asks_and_types(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [5] * 100), write(tmp_path / "b", [5] * 100, 500)
    for compat, dtype, length in ((2022, np.uint8, 137), (2026, np.int16, 138)):
        mixed = build(Blend((a, b), (0.3, 0.7)), 137, compat=compat)["train"]
        assert isinstance(mixed, BlendedDataset)
        assert (mixed.indices.dataset_index.dtype, len(mixed)) == (dtype, length)
