"""What is compiled for a run's training step, as plain data: no arrays, no devices.

`Training` executes it, the log describes it, and the memory and time models price it: whether ticks merge, how many buffers
there are, and how many chunks a tick runs are decided here only. It is cheap to make, as a search does: what needs the
schedule's table is computed when it is asked for, and by the closed forms of `schedules.registry` where it has them.
"""

import dataclasses
import functools
from typing import Any

from megajax.config import RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.config.schedule_rules import SCHEDULE_OPTIONS
from megajax.ops.attention_choice import AS_REQUESTED, FUSED, Choice
from megajax.ops.norm_kernel import LARGEST
from megajax.pipeline.options import embeds_ahead, merged_schedule, merged_ticks, stashes_nothing
from megajax.pipeline.slots import send_routes, slot_tables, stage_edges
from megajax.schedules.errors import counted
from megajax.schedules.io import is_schedule_file, load
from megajax.schedules.registry import ScheduleSpec, Slots, find, make_schedule, with_option
from megajax.schedules.schedule import BACKWARD, FORWARD, INPUT, OVERLAP_PARTS, Schedule, ScheduleError
from megajax.schedules.simulate import Costs, simulate_event, simulate_lockstep
from megajax.schedules.stages import Placement, StageLayers

__all__ = ["UNROLLED_BLOCKS", "StepProgram", "counted_slots"]

WITHOUT_KERNEL = ("geglu_exact", "clamped_swiglu")  # gates that no kernel of one pass computes
UNROLLED_BLOCKS = 64  # at most; on two CPU cores each takes 1.3 s to compile


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The training step of a valid run.

    Attributes:
      run: the run.
      attention: the implementation that runs, and why.
      in_place: weights are read, and gradients accumulated, where they are (`options.ExecutorOptions`).
      vocabulary_over_pipe: token tables are split over pipe too.
    """

    run: RunConfig
    attention: Choice
    in_place: bool
    vocabulary_over_pipe: bool

    @classmethod
    def of(
        cls,
        run: RunConfig,
        attention: Choice | None = None,
        updates_in_place: bool = True,
        vocabulary_over_pipe: bool | None = None,
    ) -> "StepProgram":
        """The program of a run.

        Args:
          run: a valid one.
          attention: the implementation that runs; None: the run's, for one that names it (`gpus.with_attention`).
          updates_in_place: what `runtime.compat.updates_in_place` says of the devices; GPUs with jax 0.12 do.
          vocabulary_over_pipe: what the sharding rules say; None: the layout, as the default rules of a model with tables.
        """
        parallel = run.parallel
        over_pipe = parallel.vocabulary_over_pipe if vocabulary_over_pipe is None else vocabulary_over_pipe
        attention = attention or Choice(parallel.attention, AS_REQUESTED)
        return cls(run, attention, updates_in_place and not parallel.rings, over_pipe)

    # The schedule.

    @functools.cached_property
    def spec(self) -> ScheduleSpec:
        """All that is known of the schedule by its name."""
        return find(self.run.parallel.schedule)

    @functools.cached_property
    def schedule_arguments(self) -> dict[str, Any]:
        """The arguments of `make_schedule`: sizes, and the options of the schedule that are set."""
        parallel = self.run.parallel
        options = {name: getattr(parallel, name) for name in SCHEDULE_OPTIONS}
        given = {name: value for name, value in options.items() if value is not None}
        if parallel.schedule in with_option("costs"):  # full recompute repeats the forward before the input's gradient
            given["costs"] = Costs(1.0, 3.0, 2.0, 1.0) if parallel.recompute == "full" else Costs()
        return {"stages": parallel.pipe, "microbatches": self.run.microbatches, "chunks": parallel.chunks, **given}

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule's table.

        Raises:
          ScheduleError: the sizes are illegal for this schedule, or a file's are not the run's.
        """
        return self.schedule_of(self.run.microbatches)

    def schedule_of(self, microbatches: int) -> Schedule:
        """The table of a step with so many microbatches: a smaller batch, as in a batch ramp, or the run's."""
        sizes = self.schedule_arguments | {"microbatches": microbatches}
        if is_schedule_file(self.run.parallel.schedule):
            _check_sizes(self.run, load(self.run.parallel.schedule), microbatches)
        return make_schedule(self.run.parallel.schedule, **sizes)

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
    def splits(self) -> bool:
        """Whether backwards are split into I and W, all or some of them."""
        return self.schedule.split if self.spec.split is None else self.spec.split

    @functools.cached_property
    def layers(self) -> StageLayers:
        """The layers of each stage, with their kinds; the table is made where only it has the placement of the stages."""
        return self.run.parallel.stage_layers(self.run.model.layers, self.placement, self.kinds)

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The kind of each layer, of a model with several."""
        return layer_kinds(self.run.model)

    @property
    def passes(self) -> int:
        """Forwards, and backwards, of a chunk on each rank."""
        return self.run.microbatches * self.run.parallel.chunks

    # How it runs.

    @property
    def computes_bubbles(self) -> bool:
        """Whether ranks without work run their blocks too: blocks have a ring that all ranks must reach."""
        return bool(self.run.parallel.rings)

    @functools.cached_property
    def skips_slots(self) -> bool:
        """Whether stages run their own blocks only, and nothing for their empty slots."""
        return self.layers.skips_slots and not self.computes_bubbles

    @functools.cached_property
    def merges(self) -> bool:
        """Whether ticks in which every rank has a forward and a backward run both in one loop over blocks.

        If blocks have collectives to hide, and run in no bubble. The loop runs a forward's block beside a backward's; of
        several kinds there are pairs of a rank's two chunks (`run_pairs`). Not where stages run fewer blocks than others,
        nor of several kinds on one stage alone, which has arrays for two slots of one kind.
        """
        parallel = self.run.parallel
        collectives = (parallel.tensor > 1 or parallel.expert > 1) and not (self.kinds and parallel.pipe == 1)
        return self.in_place and collectives and self.drains and not self.skips_slots

    @property
    def merges_all(self) -> bool:
        """Whether every tick with work on every rank is a merged one: the schedule's ticks are pairs."""
        return self.merges and self.paired

    @functools.cached_property
    def unrolls(self) -> bool:
        """Whether a rank's blocks are traced one after the other, without a loop.

        A loop over blocks copies what they save to a stash. Without a loop it stays where it was computed, and XLA does
        not compute again what a forward already has: memory is that of `--recompute none`. So not where recomputing saves
        more: attention scores, whole blocks, or weights that ZeRO-3 gathers again. Nor where ticks merge, which run two
        blocks side by side in a loop. Nor with experts, whose kernels write to the stash and add to the sums of all blocks:
        without a loop each block has its own, stacked in the end. And compiling takes longer with each block.
        """
        parallel, model = self.run.parallel, self.run.model
        saves_all = parallel.recompute == "none" or (parallel.recompute == "selective" and self.attention.name in FUSED)
        return (
            self.in_place
            and not self.merges
            and parallel.pipe == parallel.chunks == parallel.tensor == 1
            and not (parallel.offload_activations or parallel.zero == 3 or self.kinds or getattr(model, "experts", 0))
            and saves_all
            and model.layers <= UNROLLED_BLOCKS
            and self.drains
            and _one_stage_stashes_nothing(self.spec, self.run.microbatches)
        )

    @property
    def gates_in_one_pass(self) -> bool:
        """Whether the backward of a gated MLP reads gate and gated value once, for their gradients and the activation.

        If it computes the activation again, in a loop where XLA cannot take the forward's, and nothing later needs it. And
        not where XLA hides the gradient's all-gather behind that: in merged ticks of several stages, whose forwards write to
        the stash after the backward has read it, there is nothing else (Llama-2 7B: 24 ms less, 29 ms more exposed); nor is
        there with ZeRO-3, which gathers weights too.
        """
        parallel, matmuls = self.run.parallel, self.run.train.matmul_dtype
        again = parallel.recompute != "none" and parallel.recompute_blocks == 1 and not (self.splits or self.unrolls)
        nothing_to_hide = parallel.tensor == 1 or (self.merges and parallel.pipe == 1)
        computed = getattr(self.run.model, "activation", None) not in WITHOUT_KERNEL
        return self.in_place and again and nothing_to_hide and parallel.zero < 3 and matmuls is None and computed

    @property
    def expert_gates_in_one_pass(self) -> bool:
        """The same of experts without biases, which are added in fp32, whose results are weighted, and not their inputs."""
        model = self.run.model
        if not (getattr(model, "experts", 0) and self.gates_in_one_pass):
            return False
        return model.is_gated and model.expert_weighted == "result" and not model.expert_biases

    @property
    def keeps_activation(self) -> bool:
        """Whether a gated MLP's activation is saved too, and its backward computes gradients alone.

        Of one stage, two slots of a stash: they share the memory of gate and value (`stash.SlotApart`), which is twice
        an activation's.
        """
        parallel = self.run.parallel
        one_chunk = self.merges and parallel.pipe == parallel.chunks == 1 and self.slots.stash == 2
        selective = parallel.recompute == "selective" and not parallel.offload_activations
        return self.gates_in_one_pass and one_chunk and selective

    @property
    def experts_in_place(self) -> bool:
        """Whether kernels read experts' weights in the stack of all layers and add their gradients to the sums there.

        I and W do not know the stack that weights are of, and without a loop over blocks each has its own sums.
        """
        return self.in_place and self.run.parallel.zero < 3  # which gathers weights and scatters gradients

    @property
    def norms_in_one_pass(self) -> bool:
        """Whether the backward of a block's RMS norms reads each row once (`megajax.ops.norm_kernel`).

        If it computes the norm's result again, in a loop, and nothing later needs it.
        """
        model, parallel = self.run.model, self.run.parallel
        again = (
            parallel.recompute == "selective" and parallel.recompute_blocks == 1 and not (self.splits or self.unrolls)
        )
        fits = getattr(model, "norm", None) == "rmsnorm" and model.hidden <= LARGEST
        return self.in_place and again and fits and parallel.zero < 3

    @property
    def in_one_pass(self) -> tuple[str, ...]:
        """Whose backwards read once what XLA would read twice: "gates" or "gates_kept", "expert_gates" and "norms"."""
        gates = "gates_kept" if self.keeps_activation else "gates"
        each = {gates: self.gates_in_one_pass, "expert_gates": self.expert_gates_in_one_pass}
        each["norms"] = self.norms_in_one_pass
        return tuple(name for name, holds in each.items() if holds)

    # Collectives.

    @functools.cached_property
    def placement(self) -> Placement:
        """The stages of a rank (`Schedule.placement`)."""
        parallel = self.run.parallel
        placed = self.spec.placement and self.spec.placement(parallel.pipe, parallel.chunks)
        return placed or self.schedule.placement

    @functools.cached_property
    def split_backwards(self) -> float:
        """The part of a rank's backwards that run as I and W, a mean over ranks: not those that overlap a forward."""
        if not self.splits:
            return 0.0
        overlapping = sum(self.schedule.overlaps(works) for tick in self.schedule.ticks for works in tick)
        return 1 - overlapping / OVERLAP_PARTS / (self.schedule.stages * self.passes)

    @functools.cached_property
    def sends(self) -> tuple[int, int]:
        """(activations and gradients that a rank sends another one, what it sends besides in ticks without any).

        Of the rank that sends most. All ranks take part in each send of a tick (`rank.Rank.send`).
        """
        executed, microbatches = self.executed, self.run.microbatches
        routes = {direction: send_routes(self.placement, direction) for direction in (FORWARD, BACKWARD)}
        sent = {
            rank: sum(
                rank == edge[0] != edge[1] for direction in routes for edge in stage_edges(self.placement, direction)
            )
            for rank in range(executed.stages)
        }
        work = microbatches * max(sent.values())
        if not self.drains:
            return work, 0  # every tick has a forward and a backward
        ticks = self._ticks_that_send
        every = max(
            sum(ticks[way] * sum((rank == a != b) for route in routes[way] for a, b in route) for way in routes)
            for rank in sent
        )
        return work, every - work

    @functools.cached_property
    def routes(self) -> int:
        """Collective permutes of a tick that has activations and gradients, without those of ranks to themselves."""
        routes = (route for way in (FORWARD, BACKWARD) for route in send_routes(self.placement, way))
        return sum(any(sender != receiver for sender, receiver in route) for route in routes)

    @property
    def _ticks_that_send(self) -> dict[str, int]:
        """In how many ticks ranks send activations (F) and gradients (B)."""
        executed, ticks = self.executed, {FORWARD: 0, BACKWARD: 0}
        for segment in executed.segments:
            length = segment.stop - segment.start
            if segment.overlaps and self.in_place:
                length = int(slot_tables(executed).rows.sends[segment.start : segment.stop, 0].sum())
            ticks[FORWARD] += length * (FORWARD in segment.ops)
            ticks[BACKWARD] += length * (BACKWARD in segment.ops or INPUT in segment.ops)
            ticks[BACKWARD] += executed.paired and embeds_ahead(executed, segment, self.merges)  # `Rank.prepare`
        return ticks

    # Buffers and time.

    @functools.cached_property
    def schedule_slots(self) -> Slots:
        """Buffers of the schedule: by the closed form of its spec, or counted in its table where there is none."""
        arguments = self.schedule_arguments
        closed = self.spec.slots(**arguments) if self.spec.slots else None
        return closed or counted_slots(self.spec, **arguments)

    @functools.cached_property
    def merged_ticks(self) -> int:
        """How many of a rank's forwards of a chunk run in one loop with a backward.

        Of a rank that is never without work, all but those of its warm-up; where that is all, those of the table.
        """
        if not self.merges_all:
            return 0
        warm_up = self.schedule_slots.stash
        return merged_ticks(self.executed) if self.passes == warm_up else max(0, self.passes - warm_up)

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
        arguments = self.schedule_arguments
        if self.spec.bubble:
            return self.spec.bubble(costs=costs, lockstep=lockstep, **arguments)
        simulation = (simulate_lockstep if lockstep else simulate_event)(_table(self.spec, **arguments), costs)
        return simulation.makespan - simulation.ideal

    def describe(self) -> list[str]:
        """Attention, schedule and layers as lines of the log."""
        run, parallel, schedule = self.run, self.run.parallel, self.schedule
        return [
            f"attention {self.attention.name}: {self.attention.reason}; tensor overlap {parallel.tensor_overlap}",
            f"schedule  {schedule.name}, {counted(parallel.chunks, 'chunk')} a rank, "
            f"{counted(run.microbatches, 'microbatch', 'microbatches')} of {parallel.microbatch_size}: "
            f"bubble {simulate_lockstep(schedule).bubble:.1%} of the ideal time, "
            f"{counted(len(schedule.ticks), 'tick')}",
            *(f"layers    {line}" for line in self.layers.remarks),
        ]


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


def _check_sizes(run: RunConfig, schedule: Schedule, microbatches: int) -> None:
    parallel, batch = run.parallel, run.parallel.microbatch_size * run.parallel.data
    if not schedule.has_backward:
        raise ScheduleError(f"{parallel.schedule} has no backwards, so it cannot train")
    for name, of_run, of_file, change in (
        ("stages", parallel.pipe, schedule.stages, f"--pipe {schedule.stages}"),
        ("chunks", parallel.chunks, schedule.chunks, f"--chunks {schedule.chunks}"),
        ("microbatches", microbatches, schedule.microbatches, f"--global-batch-size {schedule.microbatches * batch}"),
    ):
        if of_run != of_file:
            raise ScheduleError(f"{parallel.schedule} has {of_file} {name} and the run {of_run}: pass {change}")
