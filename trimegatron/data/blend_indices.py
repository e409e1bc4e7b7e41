"""Which set each sample of a blend comes from, equal to Megatron's arrays element for element.

D sets with weights w that sum to 1. Step i takes the set whose *error*, w[d]·max(i, 1) − (samples taken from d), is
greatest, the first of equals, in float64. So after every step each set has its share to within about one sample, and
the choice does not depend on how long the blend is. Unlike Megatron's helper, a set of weight 0 is never taken.

The rule is a recurrence, but it forgets: from any start the errors soon fall into the same pattern (the nearest-vertex
rule on a simplex has one tile that attracts). So the sequence is cut into lanes that run side by side from guessed
starts; each lane's end replaces the next one's start, and lanes whose start changed run again, until none does. The
result is exact whatever the guess; if lanes do not settle, the rest is done step by step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_STEPS = 1024  # of a lane; also the lanes run side by side at most
_ROUNDS = 12  # of lanes that run again, before going step by step


class BlendIndices(NamedTuple):
    """Sample i of the blend is sample ``dataset_sample_index[i]`` of set ``dataset_index[i]``."""

    dataset_index: np.ndarray  # int16 [n]; uint8 by the rules of 2022
    dataset_sample_index: np.ndarray  # int64 [n]


def normalise(weights: np.ndarray) -> np.ndarray:
    """Weights that sum to 1, in Megatron's float64 arithmetic."""
    return np.asarray(weights, np.float64) / np.sum(np.asarray(weights, np.float64))


def blend_by_weights(weights: np.ndarray, num_samples: int, dtype: np.dtype | type = np.int16) -> BlendIndices:
    """The first ``num_samples`` choices for ``weights``, which need not be normalised."""
    weights = normalise(weights)
    maps = BlendIndices(np.empty(num_samples, dtype), np.empty(num_samples, np.int64))
    (used,) = np.nonzero(weights)
    names = used.astype(dtype)
    counts = np.zeros(len(used))
    width = _STEPS * _STEPS
    for first in range(0, num_samples, width):
        part = BlendIndices(*(array[first : first + width] for array in maps))
        counts = _fill(part, weights[used], names, counts, first)
    return maps


def blend_by_sizes(sizes: np.ndarray, dtype: np.dtype | type = np.int16) -> BlendIndices:
    """Every sample of every set once: weights are the sizes, and a set that is used up is not taken any more."""
    sizes = np.asarray(sizes, np.int64)
    maps = blend_by_weights(sizes, int(sizes.sum()), dtype)
    # Used up means an error below 0 while some other is above it, so the limit never acts but through rounding.
    assert (np.bincount(maps.dataset_index, minlength=len(sizes)) == sizes).all()
    return maps


def _fill(part: BlendIndices, weights: np.ndarray, names: np.ndarray, counts: np.ndarray, first: int) -> np.ndarray:
    """Steps ``first``, ``first`` + 1, … of the rule into ``part``, from ``counts``; returns the counts after them."""
    num_lanes = len(part.dataset_index) // _STEPS
    done = 0
    if num_lanes > 1:
        lanes = BlendIndices(*(array[: num_lanes * _STEPS].reshape(num_lanes, _STEPS) for array in part))
        begins = first + _STEPS * np.arange(num_lanes)
        _, _, starts = _run(weights, _guess(weights, begins - _STEPS // 4), begins - _STEPS // 4, _STEPS // 4)
        starts[0] = counts
        ends = np.empty_like(starts)
        stale = np.arange(num_lanes)
        for _ in range(_ROUNDS):
            picked, taken, ends[stale] = _run(weights, starts[stale], begins[stale], _STEPS)
            lanes.dataset_index[stale], lanes.dataset_sample_index[stale] = names[picked], taken
            changed = (starts[1:] != ends[:-1]).any(axis=1)
            starts[1:] = ends[:-1]
            stale = np.flatnonzero(changed) + 1
            if not len(stale):
                break
        right = int(stale[0]) if len(stale) else num_lanes  # the first lanes are right whatever the rest
        done, counts = right * _STEPS, ends[right - 1]
    if done < len(part.dataset_index):
        picked, taken, ends = _run(weights, counts[None], np.array([first + done]), len(part.dataset_index) - done)
        part.dataset_index[done:], part.dataset_sample_index[done:] = names[picked[0]], taken[0]
        counts = ends[0]
    return counts


def _run(
    weights: np.ndarray, counts: np.ndarray, begins: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rule on R lanes: what is picked [R, steps], the number of that sample in its set, the counts after."""
    lanes = np.arange(len(counts))
    counts = counts.astype(np.float64)  # exact to 2^53
    errors = np.empty_like(counts)
    picked = np.empty((len(lanes), steps), np.int64)
    taken = np.empty((len(lanes), steps), np.int64)
    for k in range(steps):
        np.multiply(np.maximum(begins + k, 1)[:, None], weights, out=errors)
        np.subtract(errors, counts, out=errors)
        choice = errors.argmax(axis=1)
        picked[:, k], taken[:, k] = choice, counts[lanes, choice]
        counts[lanes, choice] += 1
    return picked, taken, counts


def _guess(weights: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Counts near the truth at each begin: every set its whole samples, the heaviest sets one more, until all are
    dealt. A set that is behind catches up at once, one that is ahead waits for its share to grow: the heaviest wait
    least.
    """
    counts = np.floor(begins[:, None] * weights).astype(np.int64)
    rank = np.empty(len(weights), np.int64)
    rank[np.argsort(-weights, kind="stable")] = np.arange(len(weights))
    missing = begins - counts.sum(axis=1)
    return counts + (rank < missing[:, None])
