"""Bytes on one device, part by part: what the compiled program holds at its peak.

Counted from the same lists the program uses: the schedule's slots (`pipeline/slots.py`) times what a block keeps under a
recompute mode (`models/recompute.py`), and the parameters as `models/gpt.py` shapes them. Two terms are XLA's doing and
were read off programs compiled for H100s: the *workspace* and the *copies* (see `_workspace`, `stash_copies`).
`python -m benchmarks.memory_model --show` compares the sum with XLA's own over the grid it was read from.
"""

import dataclasses
import functools

from megajax.config import ModelConfig, RunConfig, padded_vocabulary
from megajax.config.parallel import SCHEDULE_FILES
from megajax.config.run_schedule import arguments, run_schedule
from megajax.estimate.attention import is_fused
from megajax.models.remat import bytes_per_layer, kept_values
from megajax.pipeline import pipedream_2bw
from megajax.pipeline.slots import slot_tables
from megajax.schedules.named import make_schedule
from megajax.schedules.schedule import Schedule

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
FORMULAS = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_1p_interleaved", "zb_v")
SPLIT_BACKWARD = ("zb_h1", "zb_h2", "zb_1p_interleaved", "zb_v", "dualpipe_v")
# Of a card's memory: what is left for the program by the CUDA context, NCCL's buffers and fragmentation. JAX's own
# documentation (GPU memory allocation) and users set XLA_PYTHON_CLIENT_MEM_FRACTION up to 0.92; its default is 0.75.
USABLE_SHARE = 0.92


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What is split further than pipe and tensor split it.

    Attributes:
      zero: 0, nothing more; 1, fp32 weights and optimizer state over the replicas (ZeRO-1, 1910.02054); 3, gradients and
        16-bit weights too, gathered block by block when needed.
      vocabulary_over_pipe: the token table and the head's work are split over pipe * tensor, not over tensor.
    """

    zero: int = 0
    vocabulary_over_pipe: bool = False

    @classmethod
    def of(cls, run: RunConfig) -> "Sharding":
        """What a run's program splits."""
        return cls(run.parallel.zero, run.parallel.vocab_parallel == "pipe" and run.parallel.pipe > 1)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Buffers of a schedule on the rank with most, as `pipeline.slots.Tables` has them."""

    stash: int
    kept: int
    inbox: int  # activations and gradients together, the two spare slots included


def slots_of(run: RunConfig) -> Slots:
    """Read off the schedule's tables. Takes a while for hundreds of ranks and microbatches: see `closed_form_slots`."""
    if run.parallel.schedule.endswith(SCHEDULE_FILES) or run.parallel.schedule == pipedream_2bw.NAME:
        return _counted(run_schedule(run))
    return _slots_of_named(run.parallel.schedule, **arguments(run))


@functools.lru_cache(maxsize=256)  # a search asks again for each recompute mode and microbatch size
def _slots_of_named(name: str, **sizes) -> Slots:
    return _counted(make_schedule(name, **sizes))


def _counted(schedule: Schedule) -> Slots:
    table = slot_tables(schedule)
    return Slots(table.stash_slots, table.kept_slots, sum(table.inbox_slots.values()) + 2)


def closed_form_slots(schedule: str, pipe: int, chunks: int, microbatches: int) -> Slots:
    """What `slots_of` finds, by formula: the schedules' docstrings, one more where bubbles write to a spare slot.

    For zb_v only with 2p - 1 microbatches or more: with fewer, it leaves out some of what it does with so many.
    """
    p, v, m = pipe, chunks, microbatches
    work = m * v
    stash = {
        "gpipe": m + 1,
        "1f1b": min(m, p),
        "eager_1f1b": min(2 * p - 1, m + 1),
        "interleaved_1f1b": min((v + 1) * p - 1, work + 1),
        "zb_h1": min(m, p),
        "zb_1p_interleaved": min(work, v * p),
        "zb_v": min(work, 2 * p),
    }[schedule]
    kept = {"zb_h1": min(m, p), "zb_1p_interleaved": min(m, p), "zb_v": min(work, 2 * p) - 1}.get(schedule, 0)
    inbox = 2
    if schedule == "gpipe":
        inbox = 1 + m
    elif schedule == "zb_1p_interleaved" and v > 1:
        inbox = (-(-3 * p // 4) if m > p else 1) + p // 2 + 1
    elif schedule == "zb_v":
        inbox = min(m, 2) + (2 if m > 2 else 1)
    if p == 1:  # nothing is sent; only the loss's gradient waits
        stash, kept = (m if schedule == "gpipe" else 1), min(kept, 1)
        inbox = m if schedule == "gpipe" else 1
    return Slots(stash, kept, inbox + 2)


def _slots(run: RunConfig) -> Slots:
    parallel = run.parallel
    few = parallel.schedule == "zb_v" and run.microbatches < 2 * parallel.pipe - 1
    if parallel.schedule in FORMULAS and parallel.group_size is None and not few:
        return closed_form_slots(parallel.schedule, parallel.pipe, parallel.chunks, run.microbatches)
    return slots_of(run)


def block_parameters(model: ModelConfig, tensor: int) -> int:
    """Parameters of one block on one device of a tensor group."""
    bias = int(model.biases)
    query_key_value = (model.heads + 2 * model.key_value_heads) * model.head_size
    gates = 2 if model.activation == "swiglu" else 1
    split = (model.hidden + bias) * (query_key_value + gates * model.feedforward_size)
    split += model.hidden * (model.hidden + model.feedforward_size)
    whole = 2 * model.hidden * bias + 2 * _norm(model)
    return split // tensor + whole


def shared_parameters(model: ModelConfig, tensor: int, pipe: int, sharding: Sharding) -> int:
    """Parameters outside the blocks on one device: token table(s), positions and the last norm; every rank holds them."""
    split = tensor * (pipe if sharding.vocabulary_over_pipe else 1)
    table = padded_vocabulary(model.vocabulary, split) // split * model.hidden
    positions = model.sequence_length * model.hidden if model.positions == "learned" else 0
    return table * (1 if model.tied_embeddings else 2) + positions + _norm(model)


def _norm(model: ModelConfig) -> int:
    return model.hidden * (2 if model.norm == "layernorm" and model.biases else 1)


def bytes_per_device(run: RunConfig, sharding: Sharding | None = None, slots: Slots | None = None) -> dict[str, int]:
    """Bytes of a step at its peak on the device with most; their sum is the peak.

    Args:
      sharding: what is split further; the run's own if not given.
      slots: of the schedule; by formula or from its tables if not given.

    Returns:
      "weights" fp32; "optimizer" AdamW's two moments, fp32; "gradients" fp32 sums; "16-bit weights" what the step
      computes with (none in fp32); "stash" what forwards keep for their backwards; "copies" of the stash that XLA makes;
      "input to weight gradients" what zero bubble's I keeps for its W; "inboxes" received activations and gradients;
      "workspace" of the block (or the head) being computed.
    """
    model, parallel = run.model, run.parallel
    item = ITEMSIZE[run.train.precision]
    sharding, slots = sharding or Sharding.of(run), slots or _slots(run)
    layers, block = model.layers // parallel.pipe, block_parameters(model, parallel.tensor)
    shared = shared_parameters(model, parallel.tensor, parallel.pipe, sharding)
    parameters = layers * block + shared
    replicas, tokens = parallel.data * parallel.context, model.sequence_length // parallel.context
    state = replicas if sharding.zero >= 1 else 1
    work = replicas if sharding.zero >= 3 else 1
    per_chunk = layers // parallel.chunks
    activation = parallel.microbatch_size * tokens * model.hidden * item
    residual = activation // (parallel.tensor if parallel.sequence_parallel else 1)
    layer = bytes_per_layer(
        model,
        parallel.recompute,
        samples=parallel.microbatch_size,
        sequence=tokens,
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        itemsize=item,
        fused_attention=is_fused(parallel),
    )
    layer //= parallel.recompute_blocks  # one input for all of them
    stashed = slots.stash * per_chunk if not parallel.offload_activations else 0  # or in the host's memory
    workspace, copies = _workspace(run, item), stashed * stash_copies(run, item)
    gathered = 2 * block * item if sharding.zero >= 3 else 0  # the block at work and the next
    return {
        "weights": 4 * parameters // state,
        "optimizer": 8 * parameters // state,
        "gradients": 4 * parameters // work,
        "16-bit weights": (item * parameters // work if item < 4 else 0) + gathered,
        "stash": stashed * layer,
        "copies": max(0, copies - (workspace if per_chunk == 1 else 0)),
        "input to weight gradients": slots.kept * per_chunk * _kept_for_weights(run, item),
        "inboxes": slots.inbox * residual,
        "workspace": workspace,
    }


def _kept_for_weights(run: RunConfig, item: int) -> int:
    """What I keeps for W of one block (`pipeline/split.py`): gradients of the matmuls' outputs.

    Under full recompute also the inputs of W's matmuls that I had to compute again with a matmul.
    """
    model, parallel = run.model, run.parallel
    tokens = parallel.microbatch_size * model.sequence_length // parallel.context
    gates = 2 if model.activation == "swiglu" else 1
    inner = gates * model.feedforward_size
    split = item * ((model.heads + 2 * model.key_value_heads) * model.head_size + inner)
    residuals = 2
    if parallel.recompute == "full":
        split += item * model.hidden + 2 * 4 * inner  # two steps of the activation function are fp32
        residuals += 1
    residual = residuals * model.hidden // (parallel.tensor if parallel.sequence_parallel else 1)
    return tokens * (split // parallel.tensor + item * residual)


def stash_copies(run: RunConfig, item: int) -> int:
    """Second copies of stashed values, by block: XLA's GPU compiler takes a transposition that the backward's matmuls want
    out of the loop over blocks, and so transposes the whole stash, once a chunk.

    Read off compiled programs (jax 0.10.2): the scores, whenever they are kept; queries, keys and values where they are
    rotated and a microbatch is more than a sample; nothing with cuDNN's attention. Where a chunk is one block there is no
    loop: the workspace then uses the copy's memory again.
    """
    parallel, model = run.parallel, run.model
    if parallel.pipe == 1 or parallel.recompute == "full" or parallel.attention == "cudnn":
        return 0
    copied = {"probabilities", "probabilities_mask"}
    if parallel.microbatch_size > 1 and model.positions == "rotary":
        copied.add("qkv")
    tokens = model.sequence_length // parallel.context
    kept = kept_values(model, parallel.recompute, tokens, is_fused(parallel))
    values = [value for value in kept if value.name in copied]
    samples = parallel.microbatch_size
    return sum(samples * value.elements * (1 if value.mask else item) // parallel.tensor for value in values)


def _workspace(run: RunConfig, item: int) -> int:
    """What is alive only while a block or the head is computed.

    A block's backward: its weights' gradients in 16 bit, and four arrays of attention scores. (Least squares over the
    grid gives 1.14 and 4.23; activations and logits add nothing, they take turns in the same memory.) The head: logits
    and their gradient. With cuDNN's attention there are no scores, and what then shows is those gradients, the head's two
    arrays and an activation of all tokens. What cuDNN itself works in is not known without a GPU, and not counted.
    """
    model, parallel = run.model, run.parallel
    samples, tokens, tensor = parallel.microbatch_size, model.sequence_length // parallel.context, parallel.tensor
    gradients = item * block_parameters(model, tensor)
    logits = 2 * item * samples * tokens * padded_vocabulary(model.vocabulary, tensor) // tensor
    if parallel.attention == "cudnn":
        return gradients + logits + item * samples * tokens * model.hidden
    return max(gradients + item * 4 * samples * model.heads * tokens * tokens // tensor, logits)
