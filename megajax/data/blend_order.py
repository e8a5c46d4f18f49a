"""The order in which a blend draws from its datasets: Megatron's, number for number.

Sample i comes from the dataset that is furthest behind its share: the largest w_d * max(i, 1) - (samples drawn from d), in
float64, the first of equals. Each dataset's own samples come in their order.

That is a loop in which every turn needs the one before. Here many stretches of it run side by side, one a lane, each from a
guess of the counts at its start; a stretch counts only if its start is the end of the one before it, and is run again from
there if it is not. So the result is the loop's, whatever was guessed. The guess rounds the shares, and then runs a little
before the stretch: wrong counts soon become the right ones, as whoever is behind is drawn.
"""

import numpy as np

LANES = 1 << 14
LEAST_STRETCH = 512  # samples a lane: below that, fewer lanes
RUN_UP = 4  # turns before a stretch, for each dataset


def blend_order(weights: np.ndarray, size: int, limits: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draws `size` samples.

    Args:
      weights: float64 [datasets], that add up to 1.
      size: number of samples.
      limits: int64 [datasets], the samples each dataset has; who has given all of them is passed over. None: no limit.

    Returns:
      dataset, int16 [size], and that dataset's sample, int64 [size].
    """
    weights = np.asarray(weights, np.float64)
    stretch = max(-(-size // LANES), LEAST_STRETCH)
    starts = np.arange(0, size, stretch)
    dataset = np.empty((len(starts), stretch), np.int16)
    sample = np.empty((len(starts), stretch), np.int64)
    run_up = np.minimum(starts, RUN_UP * len(weights))
    begins = _rounded(weights, starts - run_up)
    _run(weights, limits, starts - run_up, begins, run_up.max(initial=0), until=starts)
    begins[0] = 0
    ends = np.empty_like(begins)
    wrong = np.arange(len(starts))
    while len(wrong):
        counts = begins[wrong]
        dataset[wrong], sample[wrong] = _run(weights, limits, starts[wrong], counts, stretch)
        ends[wrong] = counts
        wrong = 1 + np.flatnonzero((begins[1:] != ends[:-1]).any(1))
        begins[wrong] = ends[wrong - 1]
    return dataset.reshape(-1)[:size], sample.reshape(-1)[:size]


def exhaustive_order(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws every sample of every dataset once, in proportion to their sizes, int [datasets]."""
    sizes = np.asarray(sizes, np.int64)
    return blend_order(sizes / float(sizes.sum()), int(sizes.sum()), sizes)


def _rounded(weights: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Counts near weights * turns that add up to turns: [lanes, datasets], whole numbers in float64."""
    shares = turns[:, None] * weights
    counts = np.floor(shares)
    missing = (turns - counts.sum(1)).astype(int)
    rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)  # 0: the largest part was cut off
    return counts + (rank < missing[:, None])


def _run(weights, limits, starts, counts, turns, until=None):
    """Runs lanes from turn `starts` [lanes] on, for `turns` turns or up to `until` [lanes]; updates counts.

    Returns:
      The datasets drawn from, and the sample of each: [lanes, turns].
    """
    lanes = np.arange(len(starts))
    dataset, sample = np.empty((len(starts), turns), np.int16), np.empty((len(starts), turns), np.int64)
    for turn in range(turns):
        now = starts + turn
        behind = weights * np.maximum(now, 1)[:, None] - counts
        if limits is not None:
            behind[counts >= limits] = -np.inf
        drawn = behind.argmax(1)
        before = counts[lanes, drawn]
        dataset[:, turn], sample[:, turn] = drawn, before
        counts[lanes, drawn] = before + (1 if until is None else now < until)
    return dataset, sample
