"""Peak bytes of the compiled program on one device, part by part.

The schedule's slots (`pipeline/slots.py`) times what a block keeps under a recompute mode, and the model's parameters
(`models/costs.py`). Two terms depend on XLA and were read off programs compiled for H100s: the *workspace* and the *copies*
(see `workspace`, `kept.stash_copies`). `python -m benchmarks.compiled memory --show` compares the sum with XLA's own figures
over the grid of runs that these terms were read from.
"""

import dataclasses

from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.kept import kept_for_weights, kept_of_block, kept_twice, rows_of, stash_copies
from megajax.estimate.kinds import layers_of_kinds
from megajax.estimate.muon_matrices import matrices_of
from megajax.estimate.optimizer_state import bytes_per_parameter
from megajax.estimate.trained import trained_parameters
from megajax.models.costs import ModelCosts
from megajax.ops.attention_choice import FUSED
from megajax.pipeline.program import StepProgram
from megajax.runtime.gpu_environment import MEMORY_FRACTION
from megajax.schedules.registry import Slots

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
MUON_COPIES = 4  # of its matrices during the update: 3.4 to 5.5 in programs compiled for H100s
USABLE_SHARE = MEMORY_FRACTION  # of a GPU's memory, by a program


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What is sharded beyond the pipeline stages and tensor parallelism.

    Attributes:
      zero: 0, nothing; 1, fp32 weights and optimizer state over data-parallel replicas (ZeRO-1, 1910.02054); 3, gradients
        and 16-bit weights too, gathered block by block when needed.
      vocabulary_over_pipe: the token table and the head's matmul are split over pipe * tensor, not over tensor.
      shards: replicas that ZeRO-3 shards over, and keeps as many copies as there are such groups; None: all replicas.
    """

    zero: int = 0
    vocabulary_over_pipe: bool = False
    shards: int | None = None

    @classmethod
    def from_config(cls, run: RunConfig) -> "Sharding":
        """The sharding of a run; without token tables, no table is split over pipe."""
        tables = model_costs(run.model).vocabulary_width > 0
        return cls(run.parallel.zero, run.parallel.vocabulary_over_pipe and tables)


def shared_parameters(model: ModelCosts, tensor: int, pipe: int, sharding: Sharding) -> int:
    """Parameters outside the blocks on one device; every stage holds them."""
    split = tensor * (pipe if sharding.vocabulary_over_pipe else 1)
    tables = padded_vocabulary(model.vocabulary, split) // split * model.vocabulary_width
    return tables + model.shared.on_device(tensor)


def block_parameters(run: RunConfig) -> tuple[int, int]:
    """Parameters of one block on one device, before ZeRO: those outside its experts, and its experts'.

    Of a run whose layers are all of one kind (`kinds.layers_of_kinds`).
    """
    model, parallel = model_costs(run.model), run.parallel
    block = model.block.on_device(parallel.tensor)
    if model.experts is None:
        return block, 0
    every, own = (model.experts.on_device(parallel.tensor, degree) for degree in (1, parallel.expert))
    return block - every, own


def block_arrays(run: RunConfig) -> tuple[int, int]:
    """How many arrays a block's parameters are: those outside its experts, and its experts'.

    Of a run whose layers are all of one kind (`kinds.layers_of_kinds`).
    """
    model, costs = run.model, model_costs(run.model)
    experts = sum(one.name.startswith("experts") for one in costs.matmuls)
    dense = len(costs.matmuls) - experts
    norms = getattr(model, "block_norms", 2) * (2 if getattr(model, "norm", "") == "layernorm" else 1)
    vectors = norms + dense * getattr(model, "biases", False) + 2 * getattr(model, "query_key_norm", False)
    return dense + vectors, max(1, experts)


def rank_parameters(run: RunConfig, sharding: Sharding) -> tuple[int, int]:
    """Parameters of a rank on one device, before ZeRO: those outside the experts, and the experts'.

    The first have d C replicas, the others d C / N.
    """
    model, parallel = model_costs(run.model), run.parallel
    common, experts = rank_block_parameters(run)
    return common + shared_parameters(model, parallel.tensor, parallel.pipe, sharding), experts


def rank_block_parameters(run: RunConfig) -> tuple[int, int]:
    """Parameters of all blocks of a rank on one device; a slot without a layer takes as much memory as another."""
    held = [(kind.rank_slots, block_parameters(kind.run)) for kind in layers_of_kinds(run)]
    return sum(slots * common for slots, (common, _) in held), sum(slots * experts for slots, (_, experts) in held)


def trained_rank_parameters(run: RunConfig, sharding: Sharding) -> tuple[int, int]:
    """Those of `rank_parameters` that are trained."""
    trained = trained_parameters(run)
    if trained is None:
        return rank_parameters(run, sharding)
    slots = [kind.rank_slots for kind in layers_of_kinds(run)]
    common, experts = (
        sum(n * block[which] for n, block in zip(slots, trained.blocks, strict=True)) for which in (0, 1)
    )
    return common + trained.shared, experts


def frozen_parameters(run: RunConfig, sharding: Sharding) -> int:
    """Parameters on one device that are not trained: stored as they are computed with, of blocks sharded by ZeRO-3."""
    trained = trained_parameters(run)
    if trained is None:
        return 0
    shared = shared_parameters(model_costs(run.model), run.parallel.tensor, run.parallel.pipe, sharding)
    own = trained_rank_parameters(run, sharding)
    common, experts = (max(0, a - b) for a, b in zip(rank_parameters(run, sharding), own, strict=True))
    outside = max(0, shared - trained.shared)
    return outside + sharded_parameters(run, (max(0, common - outside), experts), sharding.zero >= 3)


def sharded_parameters(run: RunConfig, of_rank: tuple[int, int], is_sharded: bool) -> int:
    """Parameters of a rank on one device (`rank_parameters`), sharded over their replicas or not."""
    (common, experts), replicas = of_rank, run.parallel.replicas
    if not is_sharded:
        return common + experts
    return common // replicas + experts // (replicas // run.parallel.expert)


def bytes_per_device(run: RunConfig, sharding: Sharding | None = None, slots: Slots | None = None) -> dict[str, int]:
    """Bytes of a step at its peak on the device that holds most; their sum is the peak.

    Args:
      sharding: what is sharded; the run's own if not given.
      slots: of the program; its own (`StepProgram.slots`) if not given.

    Returns:
      "weights" fp32, frozen ones in the precision; "optimizer" its state, fp32, and the average of the weights;
      "gradients" fp32 sums; "16-bit weights" those that the step computes with besides (none in fp32), two versions of both
      if the schedule does not drain; "stash" values kept from forwards to backwards; "copies" of the stash that XLA makes;
      "input to weight gradients" values that zero bubble's I keeps for its W; "inboxes" received activations and gradients;
      "workspace" of the block (or the head) being computed.
    """
    model, parallel, kinds = model_costs(run.model), run.parallel, layers_of_kinds(run)
    item, program = ITEMSIZE[run.train.precision], StepProgram.of(run)
    sharding, swapped = sharding or Sharding.from_config(run), 0 if slots else _swapped_sums(program)
    slots = slots or program.slots
    of_rank, frozen = trained_rank_parameters(run, sharding), item * frozen_parameters(run, sharding)
    state, work = (sharded_parameters(run, of_rank, sharding.zero >= level) for level in (1, 3))
    versions = 1 if program.drains else 2  # of weights, and of the gradients of each
    residual = rows_of(model, parallel) * model.hidden * item // parallel.sequence_shares
    mode = "none" if program.unrolls else None
    stashed = slots.stash if not parallel.offload_activations else 0  # otherwise it is in host memory
    of_chunk = lambda count: sum(kind.slots * count(kind.run, item) for kind in kinds)  # noqa: E731
    of_block = max(workspace(kind.run, item, sharding) for kind in kinds)
    copies = stashed * of_chunk(stash_copies)
    beside = of_block if max(kind.slots for kind in kinds) == 1 else 0  # whose memory copies of the stash share
    # ZeRO-3 gathers what is outside the blocks once, for the whole step.
    shared = trained_shared_parameters(run, sharding) if sharding.zero >= 3 else 0
    elsewhere = shared - shared // parallel.replicas
    gathered = item * elsewhere if item < 4 else 0
    # Products in 8 bits need both operands with the summed dimension innermost, which is another one in the backward. XLA
    # hoists the transposition of the blocks' weights out of the loops.
    transposed = item * sum(rank_block_parameters(run)) if run.train.matmul_dtype == "fp8" else 0
    during = {
        "16-bit weights": (versions * item * work if item < 4 or versions > 1 else 0)
        + (versions * frozen if versions > 1 else 0)
        + gathered
        + transposed,
        "stash": stashed
        * of_chunk(lambda run, item: kept_of_block(run, item, mode) + program.unrolls * kept_twice(run, item)),
        "copies": max(0, copies - beside) + max(0, swapped - of_block),
        "input to weight gradients": slots.kept * of_chunk(kept_for_weights),
        "inboxes": slots.inbox * residual,
    }
    # Before ZeRO-1 scatters the gradients of uneven stages, it copies all of them, without those of slots without a layer.
    uneven = len(kinds) == 1 and parallel.stage_layers(model.layers).idle > 0
    copied = 4 * work if sharding.zero == 1 and parallel.replicas > 1 and uneven else 0
    # Replicas sum a copy of the previous batch's gradients while the state in flight is allocated. ZeRO-1 scatters the sum.
    summed = 4 * work + (4 * state if sharding.zero else 0) if versions > 1 and parallel.replicas > 1 else 0
    return {
        "weights": 4 * state + frozen,
        "optimizer": _optimizer_state(run, state, sharding),
        # ZeRO-3 scatters the gradients of a block in each backward, the others at the end of the step.
        "gradients": versions * 4 * work + 4 * elsewhere,
        **during,
        "workspace": max(of_block, copied - sum(during.values()), summed, _update(run) - sum(during.values())),
    }


def _update(run: RunConfig) -> int:
    """Bytes of the update itself: of Muon the matrices that a device computes, and copies of them."""
    if run.train.optimizer != "muon":
        return 0
    elements = sum(one.share * one.rows * one.columns for one in matrices_of(run))
    return round(MUON_COPIES * ITEMSIZE[run.train.precision] * elements)


def _optimizer_state(run: RunConfig, held: int, sharding: Sharding) -> int:
    """Bytes of the optimizer's state and of the average of the weights.

    A device has the part of them that it has of the `held` fp32 weights, those that are trained.
    """
    average = 0 if run.train.ema_decay is None else 4 * held
    if run.train.optimizer == "adamw":
        return 8 * held + average  # two moments of each parameter, whatever the shapes of the model's
    of_blocks, of_shared = bytes_per_parameter(run.model, run.train.optimizer, run.train.freeze)
    shared = trained_shared_parameters(run, sharding)
    shared //= run.parallel.replicas if sharding.zero else 1
    return round(of_blocks * (held - shared) + of_shared * shared) + average


def trained_shared_parameters(run: RunConfig, sharding: Sharding) -> int:
    """Those of `shared_parameters` that are trained."""
    trained = trained_parameters(run)
    if trained is not None:
        return trained.shared
    return shared_parameters(model_costs(run.model), run.parallel.tensor, run.parallel.pipe, sharding)


def _swapped_sums(program: StepProgram) -> int:
    """Bytes of a copy of the summed gradients of one of the MLP's matrices, where both have the same shape on a device.

    XLA confuses the two in the conditionals of merged ticks, and copies one of them to swap their buffers, while no block is
    computed. On more than two ranks with replicas it starts them in two buffers, and does not.
    """
    parallel, model = program.run.parallel, model_costs(program.run.model)
    if trained_parameters(program.run) is not None:
        return 0
    shapes = {one.name: one.on_device(parallel.tensor) for one in model.matmuls}
    apart = parallel.pipe > 2 and parallel.replicas > 1
    merged = parallel.pipe > 1 and program.merges and program.paired
    if apart or not merged or program.layers.slots == 1 or "mlp_in" not in shapes:
        return 0
    inputs, outputs = shapes["mlp_in"]
    return 4 * program.layers.rank_slots * inputs * outputs if (inputs, outputs) == shapes["mlp_out"] else 0


def workspace(run: RunConfig, item: int, sharding: Sharding) -> int:
    """Bytes that are live only while a block or the head is computed.

    The larger of a block's (`_block_workspace`, with a fused attention kernel) and the head's: logits, of the columns that a
    device has, their gradient, and three arrays of all tokens. Without a fused kernel a block has its weights' gradients in
    16 bit and four arrays of attention scores (least squares over the grid gives 1.14 and 4.23; all else shares that memory
    at other times), with dropout also its mask, of a byte, and the probabilities before it. With ZeRO-3 a block has its
    gathered weights. cuDNN's own workspace is unknown without a GPU, and not counted.
    """
    model, parallel = model_costs(run.model), run.parallel
    samples, tokens, tensor = parallel.microbatch_size, model.sequence_length // parallel.context, parallel.tensor
    split = tensor * (parallel.pipe if sharding.vocabulary_over_pipe else 1)
    whole = item * rows_of(model, parallel) * model.hidden
    logits = 2 * item * samples * tokens * padded_vocabulary(model.vocabulary, split) // split
    scratch = samples * tokens * max(kind.scratch for _, kind in model.layers_of_kinds) // tensor
    gathered = sum(block_parameters(run)) * item if sharding.zero >= 3 else 0
    if model.experts is not None and parallel.attention in FUSED:
        return _expert_workspace(run, item) + scratch + gathered + logits + whole
    if parallel.attention in FUSED:
        return max(_block_workspace(run, item) + scratch + gathered, logits + 3 * whole)
    gradients = item * model.block.on_device(tensor) if model.experts is None else _expert_workspace(run, item)
    heads = model.attention.heads if model.attention else 0
    dropped = (1 + item) * (heads > 0 and model.attention.dropout > 0)
    scores = (4 * item + dropped) * samples * heads * tokens * tokens // tensor
    return max(gradients + scores + scratch + gathered, logits)


def _block_workspace(run: RunConfig, item: int) -> int:
    """Bytes of a block's backward with a fused attention kernel, and in merged ticks of another block's forward with it.

    What the column-parallel matmuls compute and the row-parallel ones read, and the gradients of these; what is gathered
    over the tensor group, two arrays in a backward, five in a merged tick, which also has six of the residual stream. With
    full recomputation these are four, or five in a merged tick, and two of the residual stream. Read off the buffers at the
    peak of compiled programs. Weights' gradients are added in place, except round rings.
    """
    model, parallel = model_costs(run.model), run.parallel
    rows, tensor = rows_of(model, parallel), parallel.tensor
    widths = ((one.split, *one.on_device(tensor)) for one in model.matmuls if not one.added)
    inner = sum(inputs if split == "row" else outputs for split, inputs, outputs in widths)
    whole = item * rows * model.hidden
    residual = whole // parallel.sequence_shares
    program = StepProgram.of(run)
    merged = program.merges and program.paired
    full = parallel.recompute == "full"
    gathers, residuals = (5 if merged else 4 if full else 2), (2 if full else 6 if merged else 0)
    split = tensor > 1 and parallel.sequence_parallel
    arrays = whole * (gathers if split else 2 if full else 0) + residuals * residual
    gradients = item * model.block.on_device(tensor) if parallel.rings else 0
    return int(2 * item * rows * inner) + arrays + gradients


def _expert_workspace(run: RunConfig, item: int) -> int:
    """Bytes of a block with experts: its weights' gradients, of which the experts' are fp32 if not added in place, and rows.

    Of the rows: copies of tokens and of gradients, and what is before and after the activation, with gradients. With full
    recomputation the forward of a merged tick has its own before the activation, beside that of the backward.
    """
    model, parallel, program = model_costs(run.model), run.parallel, StepProgram.of(run)
    common, experts = block_parameters(run)
    widths = [max(one.inputs, one.outputs) for one in model.matmuls if one.split and one.name.startswith("experts")]
    again = program.merges and program.paired and parallel.recompute == "full"
    width = (2 * sum(widths) + again * max(widths)) / model.experts.chosen / parallel.tensor
    room = model.expert_rows(parallel.expert, parallel.expert_dispatch)
    rows = rows_of(model, parallel) * model.experts.chosen * room
    gradients = 0 if program.experts_in_place else 4 * experts
    return item * common + gradients + int(rows * item * (2 * model.hidden + width))
