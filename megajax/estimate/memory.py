"""Peak bytes of the compiled program on one device, part by part.

The schedule's slots (`pipeline/slots.py`) times what a block keeps under a recompute mode, and the model's parameters
(`models/costs.py`). Two terms depend on XLA and were read off programs compiled for H100s: the *workspace* and the *copies*
(see `workspace`). `python -m benchmarks.compiled memory --show` compares the sum with XLA's own figures
over the grid of runs that these terms were read from.
"""

from megajax.config import RunConfig, padded_vocabulary
from megajax.estimate import model_costs
from megajax.estimate.kept import kept_for_weights, kept_of_block, kept_twice, routed_tokens, rows_of
from megajax.estimate.kinds import layers_of_kinds, modules_run
from megajax.estimate.muon_matrices import bytes_of_update
from megajax.estimate.optimizer_state import bytes_per_parameter
from megajax.estimate.parameters import (
    Sharding,
    block_parameters,
    experts_of_modules,
    frozen_parameters,
    looked_up_parameters,
    rank_block_parameters,
    sharded_parameters,
    trained_rank_parameters,
    trained_shared_parameters,
)
from megajax.estimate.trained import trained_parameters
from megajax.ops.attention_choice import FUSED
from megajax.pipeline.program import StepProgram
from megajax.runtime.gpu_environment import MEMORY_FRACTION
from megajax.schedules.registry import Slots

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
USABLE_SHARE = MEMORY_FRACTION  # of a GPU's memory, by a program


def bytes_per_device(run: RunConfig, sharding: Sharding | None = None, slots: Slots | None = None) -> dict[str, int]:
    """Bytes of a step at its peak on the device that holds most; their sum is the peak.

    Args:
      sharding: what is sharded; the run's own if not given.
      slots: of the program; its own (`StepProgram.slots`) if not given.

    Returns:
      "weights" fp32, frozen ones in the precision; "optimizer" its state, fp32, and the average of the weights;
      "gradients" fp32 sums; "16-bit weights" those that the step computes with besides (none in fp32), two versions of both
      if the schedule does not drain; "stash" values kept from forwards to backwards; "copies" of gradients, and of shards of
      experts, that XLA makes; "input to weight gradients" values that zero bubble's I keeps for its W; "inboxes" received
      activations and gradients; "workspace" of the block (or the head) being computed.
    """
    model, parallel, kinds = model_costs(run.model), run.parallel, layers_of_kinds(run)
    item, program = ITEMSIZE[run.train.precision], StepProgram.of(run)
    sharding, swapped = sharding or Sharding.from_config(run), 0 if slots else _swapped_sums(program)
    slots = slots or program.slots
    of_rank, frozen = trained_rank_parameters(run, sharding), item * frozen_parameters(run, sharding)
    state, work = (sharded_parameters(run, of_rank, sharding.zero >= level) for level in (1, 3))
    versions = 1 if program.drains else 2  # of weights, and of the gradients of each
    uncast = looked_up_parameters(run, sharding) if program.drains else 0  # `train.precision.uncast`
    residual = rows_of(model, parallel) * model.hidden * item // parallel.sequence_shares
    mode = "none" if program.unrolls else None
    stashed = slots.stash if not parallel.offload_activations else 0  # otherwise it is in host memory
    of_chunk = lambda count: sum(kind.slots * count(kind.run, item) for kind in kinds)  # noqa: E731
    # A merged tick has a forward's block of one kind beside a backward's of another: `pipeline/run_pairs.py`.
    of_kinds = sorted(workspace(kind.run, item, sharding) for kind in kinds)
    several = 2 if program.merges_all else 1
    of_block = max(sum(of_kinds[-several:]), _modules_workspace(run, item, sharding))
    # ZeRO-3 gathers what is outside the blocks once, for the whole step.
    shared = trained_shared_parameters(run, sharding) if sharding.zero >= 3 else 0
    elsewhere = shared - shared // parallel.replicas
    if sharding.zero >= 3 and (own := experts_of_modules(run)):
        elsewhere += own - own * parallel.expert_replicas // parallel.replicas
    gathered = item * elsewhere if item < 4 else 0
    shards = 0
    if sharding.zero >= 3 and _shards_experts(run):  # XLA has shards of experts in the order of their gathers, too
        shards = item * rank_block_parameters(run)[1] * parallel.expert_replicas // parallel.replicas
    # Products in 8 bits need both operands with the summed dimension innermost, which is another one in the backward. XLA
    # hoists the transposition of the blocks' weights out of the loops.
    transposed = item * sum(rank_block_parameters(run)) if run.train.matmul_dtype == "fp8" else 0
    during = {
        "16-bit weights": (versions * item * (work - uncast) if item < 4 or versions > 1 else 0)
        + (versions * frozen if versions > 1 else 0)
        + gathered
        + transposed,
        "stash": stashed
        * of_chunk(lambda run, item: kept_of_block(run, item, mode) + program.unrolls * kept_twice(run, item)),
        "copies": shards + max(0, swapped - of_block),
        "input to weight gradients": slots.kept * of_chunk(kept_for_weights),
        "inboxes": slots.inbox * residual,
    }
    gradients = versions * 4 * work + 4 * elsewhere
    if (
        run.microbatches == parallel.pipe == 1
        and parallel.attention in FUSED
        and not (model.experts or modules_run(run))
    ):
        # One forward and one backward, not in a loop: the sums are allocated when logits are no longer needed, and tables of
        # ZeRO-3 not kept for another microbatch.
        blocks = max(_block_bytes(kind.run, item, sharding) for kind in kinds)
        of_block = max(0, blocks - gathered, max(_head_bytes(kind.run, item, sharding) for kind in kinds) - gradients)
    # Before ZeRO-1 scatters the gradients of uneven stages, it copies all of them, without those of slots without a layer.
    uneven = len(kinds) == 1 and parallel.stage_layers(model.layers).idle > 0
    copied = 4 * work if sharding.zero == 1 and parallel.replicas > 1 and uneven else 0
    # Replicas sum a copy of the previous batch's gradients while the state in flight is allocated. ZeRO-1 scatters the sum.
    summed = 4 * work + (4 * state if sharding.zero else 0) if versions > 1 and parallel.replicas > 1 else 0
    return {
        "weights": 4 * state + frozen,
        "optimizer": _optimizer_state(run, state, sharding),
        # ZeRO-3 scatters the gradients of a block in each backward, the others at the end of the step.
        "gradients": gradients,
        **during,
        "workspace": max(of_block, summed, max(copied, bytes_of_update(run, item)) - sum(during.values())),
    }


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
    merged = parallel.pipe > 1 and program.merges_all
    if apart or not merged or program.layers.slots == 1 or "mlp_in" not in shapes:
        return 0
    inputs, outputs = shapes["mlp_in"]
    return 4 * program.layers.rank_slots * inputs * outputs if (inputs, outputs) == shapes["mlp_out"] else 0


def workspace(run: RunConfig, item: int, sharding: Sharding) -> int:
    """Bytes that are live only while a block or the head is computed.

    The larger of a block's (`_block_workspace`, with a fused attention kernel) and the head's: logits, of the columns that a
    device has, their gradient, and three arrays of all tokens. Without a fused kernel a block has its weights' gradients in
    16 bit and four arrays of attention scores (least squares over the grid gives 1.14 and 4.23; all else shares that memory
    at other times), with dropout also its mask, of a byte, and the probabilities before it. Between ranks that share samples
    two of the four are in fp32, of the scores of pieces, or where the sequence is exchanged for heads of whole samples, and
    dropout has its mask only. With ZeRO-3 a block has its gathered weights. cuDNN's own workspace is unknown without a GPU,
    and not counted.
    """
    model, parallel = model_costs(run.model), run.parallel
    samples, tokens, tensor = parallel.microbatch_size, model.sequence_length // parallel.context, parallel.tensor
    whole, head = item * rows_of(model, parallel) * model.hidden, _head_bytes(run, item, sharding)
    if parallel.attention in FUSED:
        return max(_block_bytes(run, item, sharding), head)
    gradients = item * model.block.on_device(tensor) if model.experts is None else _expert_workspace(run, item)
    heads = model.attention.heads if model.attention else 0
    drops = heads > 0 and model.attention.dropout > 0
    each = 4 * item + (1 + item) * drops if parallel.context == 1 else 2 * 4 + 2 * item + drops
    whole_samples = parallel.context // parallel.ring_ranks
    scores = each * samples * heads * tokens * tokens * whole_samples // tensor
    return max(gradients + scores + _beside_block(run, item, sharding), head - 3 * whole)


def _head_bytes(run: RunConfig, item: int, sharding: Sharding) -> int:
    """Bytes that the head needs: see `workspace`."""
    model, parallel = model_costs(run.model), run.parallel
    split = parallel.tensor * (parallel.pipe if sharding.vocabulary_over_pipe else 1)
    rows = rows_of(model, parallel)
    return 2 * item * rows * padded_vocabulary(model.vocabulary, split) // split + 3 * item * rows * model.hidden


def _block_bytes(run: RunConfig, item: int, sharding: Sharding) -> int:
    """Bytes that a block with a fused attention kernel needs: see `workspace`."""
    own = _block_workspace if model_costs(run.model).experts is None else _expert_workspace
    return own(run, item) + _beside_block(run, item, sharding)


def _beside_block(run: RunConfig, item: int, sharding: Sharding) -> int:
    """Bytes of mixers' scratch, and with ZeRO-3 of a block's gathered weights, of experts in each pass of a merged tick."""
    model, parallel = model_costs(run.model), run.parallel
    scratch = rows_of(model, parallel) * max(kind.scratch for _, kind in model.layers_of_kinds) // parallel.tensor
    if sharding.zero < 3:
        return scratch
    common, experts = block_parameters(run)
    passes = 1 + StepProgram.of(run).merges_all
    return scratch + item * (common + _shards_experts(run) * passes * experts)


def _shards_experts(run: RunConfig) -> bool:
    """Whether several replicas have the same experts, which ZeRO-3 shards over them."""
    return run.parallel.replicas > run.parallel.expert_replicas


def _modules_workspace(run: RunConfig, item: int, sharding: Sharding) -> int:
    """Bytes that are live while the head and the modules of multi-token prediction are computed; 0 without them.

    Forward and backward follow each other: the head's logits, and of each module what its block keeps for its backward, its
    logits, and four arrays of all tokens; beside the work of a block, or of the gradient of logits.
    """
    modules, model, parallel = modules_run(run), model_costs(run.model), run.parallel
    if modules is None:
        return 0
    split = parallel.tensor * (parallel.pipe if sharding.vocabulary_over_pipe else 1)
    logits = item * rows_of(model, parallel) * padded_vocabulary(model.vocabulary, split) // split
    whole = item * rows_of(model, parallel) * model.hidden
    each = kept_of_block(modules, item, "none") + logits + 4 * whole
    return 2 * logits + 3 * whole + model.further.layers * each + workspace(modules, item, Sharding())


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
    merged = program.merges_all
    full = parallel.recompute == "full"
    gathers, residuals = (5 if merged else 4 if full else 2), (2 if full else 6 if merged else 0)
    split = tensor > 1 and parallel.sequence_parallel
    arrays = whole * (gathers if split else 2 if full else 0) + residuals * residual
    gradients = item * model.block.on_device(tensor) if parallel.rings else 0
    return int(2 * item * rows * inner) + arrays + gradients


def _expert_workspace(run: RunConfig, item: int) -> int:
    """Bytes of a block with experts: weights' gradients, those of experts in fp32 if not added in place, and rows.

    Of the rows: copies of tokens and of gradients, and what is before and after the activation, or the gradients of these;
    both with rounds of dispatch, which keep nothing, and with full recomputation, which has tokens twice. In merged ticks
    with dispatch, but for rounds, the activations of both passes, and without recomputation a copy of the kept one; six
    arrays of the residual stream, what is gathered over the tensor group, and the tokens that the group sends here: four
    times with all-to-all, because an exchange has buffers of its own, and where nothing is sent again. Read off the buffers
    at the peak of compiled programs.
    """
    model, parallel, program = model_costs(run.model), run.parallel, StepProgram.of(run)
    common, experts = block_parameters(run)
    room = model.expert_rows(parallel.expert, parallel.expert_dispatch)
    full, rounds = parallel.recompute == "full", model.experts.in_rounds(parallel.expert, parallel.expert_dispatch)
    inner, none = model.routed_inner * (2 if full or rounds else 1), parallel.recompute == "none"
    both = program.merges_all and parallel.expert > 1 and (full or not rounds)
    if none or both:
        inner += sum(one.inputs for one in model.matmuls if one.name.startswith("experts") and one.split != "column")
    inner /= model.experts.choice.chosen * parallel.expert_shares
    tokens = rows_of(model, parallel)
    rows, hidden = routed_tokens(model, parallel) * model.experts.choice.chosen * room, (2 + full) * model.hidden
    gradients = 0 if program.experts_in_place else 4 * experts
    # Weights in 8 bits, of each pass that may run beside another one.
    quantized = (1 + full + program.merges_all) * experts if run.train.expert_matmul_dtype == "fp8" else 0
    split = parallel.tensor > 1 and parallel.sequence_parallel
    sent = model.experts.places(parallel.expert, parallel.expert_dispatch) if parallel.expert > 1 else 0.0
    sent *= 4 if none or parallel.expert_dispatch == "all_to_all" else 1
    arrays = (6 + sent) / parallel.sequence_shares + 5 * split
    return (
        item * common + gradients + quantized + int(item * (rows * (hidden + inner) + arrays * tokens * model.hidden))
    )
