"""Time of an optimizer's update: bytes for each parameter, and of Muon the products and what they send."""

from megajax.config import TrainConfig
from megajax.estimate.memory import ITEMSIZE
from megajax.estimate.muon_matrices import matrices_of
from megajax.estimate.program_kernels import Kernels, Work
from megajax.ops.optimizers.muon import STEPS

__all__ = ["update_bytes", "update_work"]

# Bytes that an update reads and writes for each parameter; Muon's are those of what is not a matrix, AdamW's. XLA fuses each
# into one pass over gradient, moments and weight, but Adafactor's, whose norms are passes of their own.
UPDATE = {"adamw": 28, "lion": 20, "adafactor": 32, "muon": 28}
AVERAGE = 8  # of the average of the weights
# Of Muon's matrices: momentum and its copy in the type that is multiplied; then weight and result.
MATRIX = 36


def update_bytes(train: TrainConfig) -> int:
    """Bytes that an update reads and writes for a parameter that is no matrix of Muon's."""
    return UPDATE[train.optimizer] + (AVERAGE if train.ema_decay is not None else 0)


def update_work(program: Kernels, state: int) -> Work:
    """The update of the `state` parameters that a device holds.

    Muon's collectives overlap the products of other matrices; what takes longer than these is exposed.
    """
    run, each = program.run, update_bytes(program.run.train)
    if run.train.optimizer != "muon":
        return program.traffic(state * each)
    found, item = list(matrices_of(run)), ITEMSIZE[run.train.precision]
    held = sum(one.stored for one in found)
    more = MATRIX - UPDATE["muon"]
    moved = state * each + held * more + sum(one.traffic for one in found) * item / 2
    seconds, tensor, data = 0.0, 0.0, 0.0
    for one in found:
        product = 2 * one.rows**2 * one.columns
        seconds += one.flops / product * program.rates.product(product, item * one.rows**2, 0.0)
        element = item * one.rows * one.columns
        if one.replicas > 1:
            part = (one.whole + one.split / one.tensor) * element / one.replicas
            data += 2 * program.all_to_all(part, one.replicas, "data")
        if one.tensor > 1:
            tensor += 2 * program.all_to_all(one.whole * element / one.tensor, one.tensor, "tensor") if one.whole else 0
            tensor += 3 * STEPS * program.ring(one.split * item * one.rows**2, one.tensor, "tensor")
    sent = tensor + data
    exposed = max(0.0, sent - seconds) / sent if sent else 0.0
    return program.traffic(moved) + Work(matmul=seconds, tensor=tensor * exposed, data=data * exposed)
