"""What is compiled for a run's training step, as plain data: no arrays, no devices.

`Training` executes it, and the memory and time models price it: whether ticks merge, how many buffers there are, and how
many chunks a tick runs are decided here only. It is cheap to make, as a search does: what needs the schedule's table is
computed when it is asked for, and by the closed forms of `schedules.registry` where it has them.
"""

import dataclasses
import functools

from megajax.config import RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.config.run_schedule import run_schedule, schedule_arguments
from megajax.ops.attention_choice import FUSED
from megajax.pipeline.options import merged_schedule, stashes_nothing
from megajax.pipeline.slots import slot_tables
from megajax.schedules.registry import ScheduleSpec, Slots, find, make_schedule
from megajax.schedules.schedule import Schedule
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep
from megajax.schedules.stages import StageLayers

__all__ = ["UNROLLED_BLOCKS", "StepProgram", "counted_slots"]

UNROLLED_BLOCKS = 64  # at most; on two CPU cores each takes 1.3 s to compile


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The training step of a valid run.

    Attributes:
      run: the run.
      attention: the implementation that runs, as `--attention` names it.
      in_place: weights are read, and gradients accumulated, where they are (`options.ExecutorOptions`).
    """

    run: RunConfig
    attention: str
    in_place: bool

    @classmethod
    def of(cls, run: RunConfig, attention: str | None = None, updates_in_place: bool = True) -> "StepProgram":
        """The program of a run.

        Args:
          run: a valid one.
          attention: the implementation that runs; None: the run's, for one that names it (`gpus.with_attention`).
          updates_in_place: what `runtime.compat.updates_in_place` says of the devices; GPUs with jax 0.12 do.
        """
        return cls(run, attention or run.parallel.attention, updates_in_place and not run.parallel.rings)

    # The schedule.

    @functools.cached_property
    def spec(self) -> ScheduleSpec:
        """All that is known of the schedule by its name."""
        return find(self.run.parallel.schedule)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule's table."""
        return run_schedule(self.run)

    @functools.cached_property
    def executed(self) -> Schedule:
        """The table that runs: where ticks merge, backwards run one tick later."""
        return merged_schedule(self.schedule) if self.merges else self.schedule

    @property
    def drains(self) -> bool:
        """Whether a step ends with an empty pipeline. PipeDream-2BW's does not, and has a program of its own."""
        return self.spec.drains

    @functools.cached_property
    def paired(self) -> bool:
        """Whether the ticks of the schedule are a forward and a backward on every rank."""
        return self.schedule.paired if self.spec.paired is None else self.spec.paired

    @functools.cached_property
    def layers(self) -> StageLayers:
        """The layers of each stage, whatever their kind."""
        return self.run.parallel.stage_layers(self.run.model.layers)

    @property
    def passes(self) -> int:
        """Forwards, and backwards, of a chunk on each rank."""
        return self.run.microbatches * self.run.parallel.chunks

    # How it runs.

    @property
    def computes_bubbles(self) -> bool:
        """Whether ranks without work run their blocks too: blocks have a ring that all ranks must reach."""
        return bool(self.run.parallel.rings)

    @property
    def merges(self) -> bool:
        """Whether ticks in which every rank has a forward and a backward run both in one loop over blocks.

        If blocks have collectives to hide, and run in no bubble. The loop runs a block of a forward beside one of a
        backward, which must be of one kind.
        """
        parallel = self.run.parallel
        collectives = parallel.tensor > 1 or parallel.expert > 1
        return self.in_place and collectives and not layer_kinds(self.run.model) and self.drains

    @functools.cached_property
    def unrolls(self) -> bool:
        """Whether a rank's blocks are traced one after the other, without a loop.

        A loop over blocks copies what they save to a stash. Without a loop it stays where it was computed, and XLA does
        not compute again what a forward already has: memory is that of `--recompute none`. So not where recomputing saves
        more: attention scores, whole blocks, or weights that ZeRO-3 gathers again. Nor where ticks merge, which run two
        blocks side by side in a loop. And compiling takes longer with each block.
        """
        parallel = self.run.parallel
        saves_all = parallel.recompute == "none" or (parallel.recompute == "selective" and self.attention in FUSED)
        return (
            self.in_place
            and not self.merges
            and parallel.pipe == parallel.chunks == parallel.tensor == 1
            and not (parallel.offload_activations or parallel.zero == 3 or layer_kinds(self.run.model))
            and saves_all
            and self.run.model.layers <= UNROLLED_BLOCKS
            and self.drains
            and _one_stage_stashes_nothing(self.spec, self.run.microbatches)
        )

    # Buffers and time.

    @functools.cached_property
    def schedule_slots(self) -> Slots:
        """Buffers of the schedule: by the closed form of its spec, or counted in its table where there is none."""
        arguments = schedule_arguments(self.run)
        closed = self.spec.slots(**arguments) if self.spec.slots else None
        return closed or counted_slots(self.spec, **arguments)

    @property
    def merged_ticks(self) -> int:
        """How many of a rank's forwards of a chunk run in one loop with a backward.

        Of a rank that is never without work, all but those of its warm-up; where one stage runs all forwards first, the
        last of them still meets the first backward.
        """
        if not (self.merges and self.paired):
            return 0
        warm_up = self.schedule_slots.stash
        return self.passes - warm_up if self.passes > warm_up else int(self.run.parallel.pipe == 1)

    @property
    def slots(self) -> Slots:
        """Buffers of the program: where ticks merge, a backward runs one tick later.

        So one chunk more is in flight, and what is received waits longer: on the first stage gradients only, on the last
        one activations only, and on a stage between them both.
        """
        slots, stages = self.schedule_slots, self.run.parallel.pipe
        if not self.merged_ticks or self.passes == slots.stash:
            return slots
        return slots._replace(stash=slots.stash + 1, inbox=slots.inbox + (2 if stages > 2 else 1))

    def bubble(self, costs: Costs, lockstep: bool) -> float:
        """Seconds that a rank idles in a step: the closed form of the schedule's spec, or simulated where there is none.

        Args:
          costs: seconds of each operation on one chunk.
          lockstep: ranks start each tick together, as megajax's do (`simulate_lockstep`); otherwise each operation starts
            as soon as it can (`simulate_event`). They differ for ticks that hold one op on each rank, if ops differ in
            cost.
        """
        arguments = schedule_arguments(self.run)
        if self.spec.bubble:
            return self.spec.bubble(costs=costs, lockstep=lockstep, **arguments)
        simulation = (simulate_lockstep if lockstep else simulate_event)(_table(self.spec, **arguments), costs)
        return simulation.makespan - simulation.ideal


@functools.lru_cache(maxsize=256)  # a search repeats the call for each recompute mode and microbatch size
def counted_slots(spec: ScheduleSpec, **arguments) -> Slots:
    """Buffers counted in the schedule's table, which takes seconds for hundreds of ranks and microbatches."""
    table = slot_tables(make_schedule(spec.name, **arguments))
    return Slots(table.stash_slots, table.kept_slots, sum(table.inbox_slots.values()) + 2)


@functools.lru_cache(maxsize=64)  # likewise
def _table(spec: ScheduleSpec, **arguments) -> Schedule:
    return make_schedule(spec.name, **arguments)


@functools.lru_cache(maxsize=64)
def _one_stage_stashes_nothing(spec: ScheduleSpec, microbatches: int) -> bool:
    return stashes_nothing(make_schedule(spec.name, stages=1, microbatches=microbatches, chunks=1))
