"""The batch sizes of a run with a batch ramp (2104.04473 section 5.1, GPT-3's runs), and the number of steps."""

from collections.abc import Iterator

from megajax.config.train import TrainConfig

PADDING = 2**32 - 1  # the "sample" number of padding in a smaller batch; its weights are 0


def batch_size(train: TrainConfig, consumed: int) -> int:
    """Samples of the step that starts after `consumed` samples.

    Each of the sizes below the global batch gets an equal share of the ramp's samples.
    """
    sizes = train.batch_sizes
    return sizes[_size_number(train, len(sizes), consumed)]


def remaining_steps(train: TrainConfig, consumed: int) -> tuple[int, int]:
    """Steps from `consumed` samples to the end of the run, and the samples consumed at its end.

    The run ends with the first step that reaches steps * global_batch_size samples. Behind a batch ramp that step may
    exceed them, by less than the global batch size.
    """
    steps = 0
    for count, size in _equal_batches_from(train, consumed):
        steps, consumed = steps + count, consumed + count * size
    return steps, consumed


def equal_batches(train: TrainConfig) -> list[tuple[int, int, int]]:
    """Each stretch of steps with equal batches: steps and samples before it, and the batch size. The last one has no end."""
    found, steps, consumed = [], 0, 0
    for count, size in _equal_batches_from(train, 0):
        found.append((steps, consumed, size))
        steps, consumed = steps + count, consumed + count * size
    return found if found[-1][2] == train.global_batch_size else [*found, (steps, consumed, train.global_batch_size)]


def _equal_batches_from(train: TrainConfig, consumed: int) -> Iterator[tuple[int, int]]:
    """(steps, batch size) of each stretch of steps with equal batches, from `consumed` samples to the end of the run."""
    total, sizes = train.steps * train.global_batch_size, train.batch_sizes
    while consumed < total:
        number = _size_number(train, len(sizes), consumed)
        end = total
        if number < len(sizes) - 1:
            end = min(total, -(-(number + 1) * train.batch_ramp[2] // (len(sizes) - 1)))  # the next size starts here
        count = -(-(end - consumed) // sizes[number])
        yield count, sizes[number]
        consumed += count * sizes[number]


def _size_number(train: TrainConfig, sizes: int, consumed: int) -> int:
    """Index, below `sizes`, of the batch size of the step that starts after `consumed` samples."""
    last = sizes - 1
    return min(consumed * last // train.batch_ramp[2], last) if last else 0
