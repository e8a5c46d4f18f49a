"""Seconds of a step of megajax's own program: its blocks (`program_blocks.py`), and what a step has besides.

ends           embedding, head, embedding's backward; split over `pipe`, with sums over it
ticks          received values written, sends between stages, the host's waits for conditions
once a step    cast, sums over replicas, the gradient's norm, the update (`update_time.py`); zeros for the stash and the sums
"""

import functools
import operator

from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate.communication import step_sends
from megajax.estimate.gpus import Gpu
from megajax.estimate.kinds import layers_of_kinds, modules_run, stage_layer_counts
from megajax.estimate.parameters import sharded_parameters, trained_rank_parameters
from megajax.estimate.program_blocks import Blocks
from megajax.estimate.program_kernels import Kernels, Work
from megajax.estimate.update_time import update_work
from megajax.schedules.simulate import Costs

__all__ = ["Program"]

# Kernels of a tick, of the head, of the embedding and of its backward, and once a step.
TICK, HEAD, EMBED, STEP = 15, 30, 6, 400
# Bytes for each parameter, once a step: cast, zeros for the sums, norm.
CAST, ZEROS, NORM = 6, 4, 4
# Bytes for each parameter of the token table, in each backward of the embedding: zeros, the rows added, the sum.
TABLE = 18


class Program(Kernels):
    """The parts of a run's step; arguments as for `Kernels`.

    Attributes:
      kinds: of its layers, the blocks of each with the slots that a chunk has for them.
      modules: the blocks of multi-token prediction; None: there are none.
    """

    def __init__(self, run: RunConfig, gpu: Gpu):
        super().__init__(run, gpu)
        self.kinds = [(Blocks(kind.run, gpu, self.program), kind.slots) for kind in layers_of_kinds(run)]
        modules = modules_run(run)
        self.modules = Blocks(modules, gpu) if modules else None  # in no loop, whatever the schedule

    @functools.cached_property
    def _counts(self) -> tuple[int, ...]:
        """Blocks of each kind that the slowest stage has in a chunk: the others wait for it, in each microbatch.

        Of a model with one kind of layers, what runs for a slot without a layer takes as long as a layer.
        """
        stages = stage_layer_counts(self.run)
        each = [kind.forward.total + kind.backward.total for kind, _ in self.kinds] if len(stages) > 1 else []
        return max(stages, key=lambda counts: sum(map(operator.mul, each, counts)))

    def _chunk(self, part: str) -> Work:
        """A part of the blocks of a chunk, such as "forward"."""
        return sum(
            (getattr(kind, part) * count for (kind, _), count in zip(self.kinds, self._counts, strict=True)), Work()
        )

    @functools.cached_property
    def _table(self) -> float:
        """Rows of the token table on a device."""
        shares = self.parallel.tensor * (self.parallel.pipe if self.sharding.vocabulary_over_pipe else 1)
        return padded_vocabulary(self.model.vocabulary, shares) // shares if self.model.vocabulary else 0

    @functools.cached_property
    def _over_pipe(self) -> float:
        """Seconds of the sum of a microbatch's residual over `pipe`, if all ranks share the ends."""
        return self.all_reduce(self.residual, self.parallel.pipe, "pipe") if self.sharding.vocabulary_over_pipe else 0.0

    def _embedding(self, count: float) -> Work:
        """Kernels that move so many bytes of the table, and the sums over `tensor` and `pipe`."""
        return self.traffic(count, EMBED) + Work(tensor=self._collective, pipe=self._over_pipe)

    @functools.cached_property
    def _head(self) -> Work:
        """Logits and loss of a microbatch, with their gradients; and the modules that predict further tokens."""
        if not self.modules:
            return self._logits
        further, block = self.model.further, self.modules
        work = self._logits + block.forward + block.backward
        for one in further.head:
            work += self.matmul(self.rows / self.split, one.inputs, one.outputs) * 3
        # the embedding of the further tokens, and its gradient's rows
        table, whole = self._table * self.model.hidden, self.rows * self.model.hidden * self.item
        work += self._embedding(table * self.item + 4 * whole) + self._embedding(TABLE * table + 3 * whole)
        return self._logits + work * further.layers

    @functools.cached_property
    def _logits(self) -> Work:
        """Logits of one loss."""
        rows, hidden, item = self.rows, self.model.hidden, self.item
        work = self.matmul(rows, hidden, self._table) + self.matmul(rows, self._table, hidden)
        gradient = self.matmul(hidden, rows, self._table, sums=True)
        work += gradient
        for one in self.model.head:
            work += self.matmul(rows / self.split, one.inputs, one.outputs) * 3
        moved = 3 * rows * self._table * item + 10 * self.residual
        # The input's copy, and its gradient's sum over `pipe`, in 16 bits an all-to-all, beside the matmul of the weight's
        # gradient, and a gather; and each token's largest logit, their sum and the label's, over all that share the logits.
        sums, statistics = 0.0, 3 * self.all_reduce(4 * rows, self.parallel.tensor, "tensor")
        if self.sharding.vocabulary_over_pipe:
            pipe = self.parallel.pipe
            statistics = 3 * self.all_reduce(4 * rows, pipe * self.parallel.tensor, "tensor")
            parts = max(0.0, self.all_to_all(self.residual / pipe, pipe, "pipe") - gradient.matmul)
            sums = self._over_pipe + parts + self.ring(self.residual, pipe, "pipe")
        exposed = Work(tensor=2 * self._collective, pipe=sums + statistics)
        return work + self.traffic(moved, HEAD) + exposed

    # The step.

    @functools.cached_property
    def blocks(self) -> Work:
        """The blocks of all microbatches."""
        merged = self.program.merged_ticks
        alone = (self._chunk("forward") + self._chunk("backward")) * (self.program.passes - merged)
        return self._chunk("merged") * merged + alone if merged else alone

    @functools.cached_property
    def ends(self) -> Work:
        """Embedding, head and embedding's backward of all microbatches.

        The embedding's rows are summed over `tensor`, and over `pipe`; their gradients are added to those of the table, all
        of which are added to the sums. On a stage with fewer blocks than others they run beside blocks of these.
        """
        if not self.model.vocabulary:
            return Work()
        first, *_, last = (0, 0, 0) if self._shares_ends else self._fewer
        whole, table = self.rows * self.model.hidden * self.item, self._table * self.model.hidden
        forward = self._embedding(table * self.item + whole + 4 * self.residual)
        backward = self._embedding(TABLE * table + 3 * whole + 6 * self.residual)
        blocks = self.kinds[0][0]
        beside = lambda end, blocks: end * (max(0.0, end.total - blocks.total) / (end.total or 1.0))  # noqa: E731
        if not first and not last:  # nothing runs beside them
            return (forward + self._head + backward) * self.run.microbatches
        ends = beside(forward, blocks.forward * first) + beside(self._head, blocks.forward * last)
        return (ends + beside(backward, blocks.backward * first)) * self.run.microbatches

    @property
    def _shares_ends(self) -> bool:
        """Whether no stage has the ends alone, or all run their empty slots too."""
        return self.sharding.vocabulary_over_pipe or not self.program.skips_slots

    @property
    def _fewer(self) -> list[int]:
        """How many blocks fewer than the largest each stage has."""
        layers = self.program.layers
        return [layers.slots - count for count in layers.counts]

    @functools.cached_property
    def ticks(self) -> Work:
        """The rest of the ticks, besides blocks and ends: received values written, small kernels, exposed sends, and waits.

        Sends overlap the other pass in a tick that has both of them in loops of their own, and the ends; but not in merged
        ticks where the ends are split over `pipe`, which begin with a sum over it that waits for the sends.
        """
        passes, microbatches = self.program.passes, self.run.microbatches
        if self.parallel.pipe == 1:
            return self.traffic(4 * self.residual, TICK) * passes
        ticks = passes * (1 if self.program.paired else 3)
        work = self.traffic(9 * self.residual, TICK) * ticks + Work(waits=self._waits * self.rates.synchronisation)
        routes = self.program.routes
        one = routes * self.send(self.residual, "pipe", self.parallel.pipe)
        exposed_ticks = self.program.merged_ticks if self.program.paired else ticks
        with_ends = min(exposed_ticks, microbatches * (1 if self.program.paired else 2))
        hidden = min(one, self.ends.total / microbatches / (1 if self.program.paired else 2)) * with_ends
        if self.program.paired and self.sharding.vocabulary_over_pipe:
            hidden = 0.0
        return work + Work(pipe=max(0.0, one * exposed_ticks - hidden))

    @property
    def _waits(self) -> float:
        """How often the host reads which chunk an operation is of, or whether there is one, and which ends a tick has."""
        if not self.program.in_place:
            return 0.0
        if not self.program.paired:
            return 3 * self.program.passes * (4 if self.program.splits else 3)
        several = 2 if self.parallel.chunks > 1 else 0
        return self.program.merged_ticks * several + (self.program.passes - self.program.merged_ticks) * 6

    @functools.cached_property
    def once(self) -> Work:
        """The work done once in a step, after the last tick."""
        run, parallel = self.run, self.parallel
        held, zero = trained_rank_parameters(run, self.sharding), self.sharding.zero
        state, sums = (sharded_parameters(run, held, is_sharded) for is_sharded in (zero > 0, zero == 3))
        in_memory = not (self.program.unrolls or parallel.offload_activations)
        kept = sum(kind.kept * slots for kind, slots in self.kinds)
        stash = self.program.slots.stash * kept if in_memory else 0
        moved = state * (CAST + NORM) + sums * ZEROS + stash
        sent = [Work(**{one.axis.split()[0]: self.seconds_of(one)}) for one in step_sends(run)]
        return sum(sent, self.traffic(moved, STEP) + update_work(self, state))

    @functools.cached_property
    def parts(self) -> Work:
        """All of a rank's work in a step; the bubble is not included."""
        return self.blocks + self.ends + self.ticks + self.once

    @functools.cached_property
    def costs(self) -> Costs:
        """Seconds of each operation on one chunk, of which the bubble consists."""
        forward, whole, part = (self._chunk(name).total for name in ("forward", "backward", "input"))
        return Costs(forward, whole, part, whole - part)
