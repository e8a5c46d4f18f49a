"""The layout: how the model and its batch are split over devices, and which schedule runs the pipeline."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megajax.config.errors import ConfigError, divisors, either, multiples, one_of
from megajax.config.fields import check_fields, setting
from megajax.config.schedule_rules import check_schedule
from megajax.config.stage_layout import check_pipeline_layout, layers_of_stages
from megajax.schedules.registry import names, placement_of
from megajax.schedules.stages import Placement, StageLayers, loop

MESH_AXES = ("data", "pipe", "tensor")
# In one process. XLA starts threads for each of them, and a program is compiled for all.
MOST_CPU_DEVICES = 512
DEFAULT_CPU_DEVICES = 8  # of the whole run, without GPUs, --devices and degrees of parallelism


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and its batch are split over data * context * pipe * tensor devices (2104.04473 section 3)."""

    data: int = setting(1, "data-parallel replicas; each takes global_batch_size / data samples of a step")
    pipe: int = setting(1, "pipeline stages (ranks) the layers are split over")
    tensor: int = setting(1, "devices each layer's matrices are split over; keep within one host's fast links")
    context: int = setting(
        1, "devices that share a sample's sequence (context parallelism); neighbours on the mesh's data axis"
    )
    context_exchange: str = setting(
        "auto",
        "how attention gets what the other devices of a sample have: keys and values sent round a ring, or parts of the "
        "sequence exchanged for parts of the heads (all_to_all, as DeepSpeed-Ulysses), which every schedule can run; auto: "
        "what the time model says is faster, of those that the heads and the schedule allow",
        ("auto", "ring", "all_to_all"),
    )
    expert: int = setting(
        1,
        "replicas that split a layer's experts among them: a group of neighbours on the mesh's data axis; divides data * "
        "context",
    )
    expert_tensor: int | None = setting(
        None,
        "devices that each expert's matrices are split over, as Megatron-Core's expert-tensor-parallel-size: those of "
        "tensor, or 1, with which the experts are split over the tensor ranks of the group too, and expert counts them all",
        shown_default="tensor",
    )
    expert_dispatch: str = setting(
        "auto",
        "how tokens get to the replicas that have their experts: an all-gather of all tokens, or an all-to-all of those "
        "that each replica has experts for, with room for all that could be there, or (bucketed) for one and a half times "
        "balanced loads and the rest in rounds; auto: gather or all_to_all, what the time model says is faster, never a "
        "ragged exchange",
        ("auto", "gather", "all_to_all", "bucketed"),
    )
    chunks: int = setting(
        1,
        "model chunks per pipeline rank: 2 for zb_v and dualpipe_v, even for hanayo, any number for interleaved schedules, "
        "else 1",
    )
    schedule: str = setting(
        "interleaved_1f1b",
        f"order of the pipeline's forward and backward passes: {', '.join(names())}, or a schedule's file",
        metavar="NAME|FILE.csv|FILE.json",
        text_kind="path",
    )
    group_size: int | None = setting(
        None, "interleaved_1f1b: microbatches that a chunk runs before the next chunk starts", shown_default="pipe"
    )
    live_chunks: int | None = setting(
        None, "auto: chunk activations that a rank may hold at once", shown_default="any number"
    )
    pipeline_layout: str | None = setting(
        None,
        "the layers of each stage in the order of the model, as in Megatron-LM: stages between |, E the embedding, t a "
        "layer, t*8 and (tt|)*4 repeated, L the loss; or numbers such as 0,8,8,0",
        metavar="E|t*8|t*8|L",
        shown_default="equal stages; if they do not divide the layers, fewer on the last and the first",
    )
    microbatch_size: int = setting(1, "samples in one forward pass of a replica")
    sequence_parallel: bool = setting(True, "split norms, dropout and residuals by sequence over tensor (2205.05198)")
    vocab_parallel: str = setting(
        "pipe",
        "devices that share embedding and head: all of pipe * tensor, or, as in Megatron-LM, the tensor group of the first "
        "and last stage; auto: what fits and is faster by the time model",
        ("pipe", "tensor", "auto"),
    )
    zero: int = setting(
        0,
        "state sharded over data-parallel replicas: 0 none; 1 optimizer state and fp32 weights; 3 weights and gradients "
        "too",
        (0, 1, 3),
    )
    recompute: str = setting(
        "selective",
        "activations that the backward pass recomputes: none, those of the attention core (selective), or the whole "
        "block's (full)",
        ("none", "selective", "full"),
    )
    recompute_blocks: int = setting(1, "full recompute: blocks recomputed together, with one input stashed for all")
    offload_activations: bool = setting(
        False, "keep the stashed activations in host memory, transferred block by block"
    )
    attention: str = setting(
        "auto",
        "implementation of attention; auto: cudnn or tokamax, by the GPU, the model's heads and its mask, where one of them "
        "runs, else xla",
        ("auto", "xla", "cudnn", "tokamax"),
    )
    tensor_overlap: str = setting(
        "none",
        "ring: split the matmuls of a tensor group so that their communication, round a ring, overlaps them",
        ("none", "ring"),
    )
    latency_estimates: str = setting(
        "model",
        "on GPUs, the times by which XLA decides what overlaps a collective; roofline: all are estimated from the compiled "
        "step, which is then compiled once more; xla: its own; model: as roofline where a tensor group spans hosts, or "
        "tokens go by all-to-all to experts of recomputed blocks, else its own, and estimates of what it is wrong about",
        ("model", "xla", "roofline"),
    )
    axis_order: tuple[str, ...] = setting(
        MESH_AXES,
        "mesh axes, outermost first; neighbours on the last one get the fastest links",
        metavar="AXIS,AXIS,AXIS",
    )

    @property
    def vocabulary_over_pipe(self) -> bool:
        """Whether token tables are split over pipe too, if there are any. "auto" counts as tensor until it is resolved."""
        return self.vocab_parallel == "pipe" and self.pipe > 1

    @property
    def vocabulary_shares(self) -> int:
        """Devices that the token tables' rows are split over."""
        return self.tensor * (self.pipe if self.vocabulary_over_pipe else 1)

    @property
    def sequence_shares(self) -> int:
        """Devices that a sample's residual stream is split over in a replica."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def experts_over_tensor(self) -> bool:
        """Whether each tensor rank has whole experts of its own (MoE parallel folding, 2504.14960 section 3)."""
        return self.expert_tensor == 1 and self.tensor > 1

    @property
    def expert_shares(self) -> int:
        """Devices that each expert's matrices are split over."""
        return 1 if self.experts_over_tensor else self.tensor

    @property
    def expert_replicas(self) -> int:
        """Replicas that split a layer's experts."""
        return self.expert // self.tensor if self.experts_over_tensor else self.expert

    @property
    def replicas(self) -> int:
        """Devices that hold the same parameters outside experts, and have other tokens."""
        return self.data * self.context

    @property
    def devices(self) -> int:
        """Devices the mesh needs."""
        return self.replicas * self.pipe * self.tensor

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The size of each mesh axis, in the mesh's order. Without expert parallelism there is no axis `expert`."""
        return {**self.replica_sizes, "pipe": self.pipe, "tensor": self.tensor}

    @property
    def replica_sizes(self) -> dict[str, int]:
        """The sizes of the mesh axes over which the devices have other tokens, in the mesh's order."""
        group = self.expert_replicas
        return {"data": self.replicas} if group == 1 else {"data": self.replicas // group, "expert": group}

    @property
    def rings(self) -> tuple[str, ...]:
        """The options for which a block communicates round a ring of devices. `context_exchange` "auto" counts as ring."""
        tensor = self.tensor_overlap == "ring" and self.tensor > 1
        return (*(["context"] if self.ring_ranks > 1 else []), *(["tensor_overlap"] if tensor else []))

    @property
    def ring_ranks(self) -> int:
        """Ranks between whose parts of a sample attention's products are split; 1: a product has whole samples."""
        return 1 if self.context_exchange == "all_to_all" else self.context

    def replaced(self, **fields: Any) -> "ParallelConfig":
        """As `dataclasses.replace`, in a tenth of its time: a search makes hundreds of thousands of layouts.

        All attributes are copied: a layout has its fields only, no cached values, and nothing is checked when one is made
        (`validate` does that).

        Raises:
          TypeError: for a field that there is not.
        """
        if unknown := fields.keys() - vars(self).keys():
            raise TypeError(f"ParallelConfig has no field {', '.join(sorted(unknown))}")
        made = object.__new__(type(self))
        vars(made).update(vars(self) | fields)
        return made

    def stage_layers(
        self, layers: int, placement: Placement | None = None, kinds: tuple[str, ...] | None = None
    ) -> StageLayers:
        """The layers of each stage, of a model with this many.

        `placement`: that of the schedule's table, of a schedule that only has it there. `kinds`: of the layers.
        """
        placement = placement or placement_of(self.schedule, self.pipe, self.chunks)
        if own := layers_of_stages(self.pipeline_layout):
            placement = dataclasses.replace(placement or loop(self.pipe, self.chunks), layers=own)
        return StageLayers(layers, self.pipe, self.chunks, placement, self.recompute_blocks, kinds)

    def validate(self) -> None:
        """Checks the layout by itself; `ModelConfig.check_parallel` checks it against the model.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        check_fields(self)
        if sorted(self.axis_order) != sorted(MESH_AXES):
            raise ConfigError(
                f"axis_order = {','.join(map(str, self.axis_order))} must hold {', '.join(MESH_AXES)} once each, "
                f"outermost first: pass --axis-order {','.join(MESH_AXES)}."
            )
        check_schedule(self)
        check_pipeline_layout(self)
        over = self.tensor if self.experts_over_tensor else 1
        if self.expert_tensor not in (None, 1, self.tensor) or self.expert % over:
            raise ConfigError(
                f"expert_tensor = {self.expert_tensor} must be tensor = {self.tensor}, or 1 where that divides expert = "
                f"{self.expert}: pass {one_of('expert', multiples(self.tensor, self.expert), self.expert)} with "
                "--expert-tensor 1, or leave --expert-tensor out."
            )
        if self.experts_over_tensor and not self.sequence_parallel:
            raise ConfigError(
                "expert_tensor = 1 exchanges the tokens of each tensor rank's part of the sequence, and sequence_parallel = "
                "False does not split it: pass --sequence-parallel, or leave --expert-tensor out."
            )
        if (replicas := self.replicas) % (group := self.expert_replicas):
            given = f"data * context = {self.data} * {self.context}" if self.context > 1 else "data"
            given = f"tensor * {given} = {self.tensor} * {replicas}" if over > 1 else f"{given} = {replicas}"
            legal = [over * count for count in divisors(replicas)]
            data = multiples(group // math.gcd(group, self.context), self.data)
            raise ConfigError(
                f"expert = {self.expert} does not divide {given}, whose replicas split the experts: pass "
                f"{either(one_of('expert', legal, self.expert), one_of('data', data, self.data))}."
            )
        if self.chunks > 1 and self.pipe == 1:
            raise ConfigError(
                f"chunks = {self.chunks} interleaves pipeline stages, but pipe = 1 is a single stage: "
                "pass --chunks 1, or --pipe 2 or more."
            )
        if self.recompute_blocks > 1 and self.recompute != "full":
            raise ConfigError(
                f"recompute_blocks = {self.recompute_blocks} is for recompute full, not {self.recompute}: pass "
                "--recompute full, or omit --recompute-blocks."
            )
        if self.tensor_overlap == "ring" and not self.sequence_parallel:
            raise ConfigError(
                "tensor_overlap = ring sends parts of the sequence, but sequence_parallel = False does not split it: "
                "pass --sequence-parallel or --tensor-overlap none."
            )
