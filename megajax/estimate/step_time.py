"""Time of a step of megajax's own program, part by part, from its kernels and collectives (`program_time.py`).

It follows from the run, the model's costs, the GPU (`gpus.py`) and the rates of `rates.py`. What is left out: loading data,
hosts that are always slow, contention between communication and compute.
"""

import dataclasses

from megajax.config import RunConfig
from megajax.estimate.gpus import Gpu
from megajax.estimate.program_time import Program
from megajax.estimate.rates import waiting
from megajax.schedules.simulate import Costs


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, part by part; they add up to `total`.

    Attributes:
      blocks: matmuls, attention and memory traffic of a rank's blocks, all microbatches.
      head: embedding, logits and loss, likewise.
      tensor: exposed communication within tensor groups.
      bubble: idle while the pipeline fills and drains, and in lockstep during the longer op of a tick.
      sends: exposed communication between stages.
      data: exposed gradient reduction over replicas, and gathering of weights.
      optimizer: reading gradients, moments and weights, and writing them; Muon's products.
      context: exposed sends of keys and values round the rings of context parallelism.
      offload: moving stashed activations to host memory and back.
      ends: exposed communication over `pipe` of embedding and head, where all stages share them.
      gaps: between kernels, which take time to launch.
      waits: for the host, which reads conditions that are known at run time only.
      expert: exposed communication within the groups of replicas that split experts.
      slowest: waiting for the slowest GPU, whose times vary; a compiled program's account does not have it.
    """

    blocks: float
    head: float
    tensor: float
    bubble: float
    sends: float
    data: float
    optimizer: float
    context: float
    offload: float
    ends: float
    gaps: float
    waits: float
    expert: float
    slowest: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        return self.tensor + self.context + self.expert + self.sends + self.data + self.ends


def step_time(run: RunConfig, gpu: Gpu) -> StepTime:
    """Predicted time of one optimizer step of `run` on a cluster of this GPU; `make_mesh` places the mesh on hosts.

    Raises:
      ConfigError: the GPU has no peak for the run's precision.
    """
    program = Program(run, gpu)
    ticks, once, whole = program.ticks, program.once, program.parts
    found = StepTime(
        blocks=program.blocks.compute + ticks.compute,
        head=program.ends.compute,
        tensor=whole.tensor,
        bubble=program.program.bubble(program.costs, lockstep=True) if run.parallel.pipe > 1 else 0.0,
        sends=ticks.pipe,
        data=whole.data + once.pipe,
        optimizer=once.compute,
        context=whole.context,
        offload=whole.offload,
        ends=program.ends.pipe,
        gaps=whole.gaps,
        waits=whole.waits,
        expert=whole.expert,
    )
    return dataclasses.replace(found, slowest=found.total * waiting(gpu, run.parallel.devices))


def chunk_costs(run: RunConfig, gpu: Gpu) -> Costs:
    """Seconds of each operation on one chunk, of which `step_time` takes the bubble to consist; raises as it does."""
    return Program(run, gpu).costs
