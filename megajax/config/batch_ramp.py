"""The batch sizes of a run with a batch ramp (2104.04473 section 5.1, GPT-3's runs), and the number of steps."""

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
    steps, total = 0, train.steps * train.global_batch_size
    sizes = train.batch_sizes
    while consumed < total:
        number = _size_number(train, len(sizes), consumed)
        end = total
        if number < len(sizes) - 1:
            end = min(total, -(-(number + 1) * train.batch_ramp[2] // (len(sizes) - 1)))  # the next size starts here
        count = -(-(end - consumed) // sizes[number])
        steps, consumed = steps + count, consumed + count * sizes[number]
    return steps, consumed


def _size_number(train: TrainConfig, sizes: int, consumed: int) -> int:
    """Index, below `sizes`, of the batch size of the step that starts after `consumed` samples."""
    last = sizes - 1
    return min(consumed * last // train.batch_ramp[2], last) if last else 0
