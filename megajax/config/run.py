"""What a run is: the model, how it is laid over devices, and how it is trained.

Three frozen dataclasses and the `RunConfig` that holds them; two more say what a run leaves behind and how its processes
find each other, and change nothing that it computes. A field's comment is its line of `--help` (see `setting`).
Nothing here imports jax: a configuration can be read, checked and counted on any machine.
"""

import math
from dataclasses import MISSING, dataclass, field
from typing import Any

from megajax.config.checks import check_run
from megajax.config.errors import ConfigError, near, option
from megajax.config.presets import ALIASES, MODELS

__all__ = [
    "PRESETS",
    "ConfigError",
    "DataConfig",
    "LaunchConfig",
    "ModelConfig",
    "OutputConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainConfig",
    "near",
    "option",
    "padded_vocabulary",
    "preset",
    "setting",
]


def setting(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field whose comment, `text`, is also its help on the command line (`field.metadata["help"]`)."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer. The defaults are GPT's; llama's are in PRESETS["llama2-7b"]."""

    name: str = setting("custom", "name of the model, as printed and as stored in checkpoints")
    layers: int = setting(MISSING, "number of transformer blocks")
    hidden: int = setting(MISSING, "width of the residual stream")
    heads: int = setting(MISSING, "attention (query) heads; a head has hidden / heads elements")
    kv_heads: int | None = setting(None, "key and value heads; not given: as many as heads (grouped-query if fewer)")
    feedforward: int | None = setting(None, "inner width of the MLP; not given: 4 * hidden")
    vocabulary: int = setting(MISSING, "tokens the model knows, before padding (see padded_vocabulary)")
    sequence_length: int = setting(MISSING, "tokens in a training sample")
    dropout: float = setting(0.0, "probability of dropping an element: embedding, attention and both block outputs")
    norm: str = setting("layernorm", "normalisation before attention, MLP and head", ("layernorm", "rmsnorm"))
    activation: str = setting("gelu", "the MLP's nonlinearity; swiglu has a third, gating matrix", ("gelu", "swiglu"))
    positions: str = setting("learned", "a learned table added to the embedding, or rotary", ("learned", "rotary"))
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    tied_embeddings: bool = setting(True, "the output head uses the token embedding's weights")
    biases: bool = setting(True, "linear layers and layer norms add a bias (an rmsnorm never does)")
    init_deviation: float = setting(0.02, "standard deviation of the initial weights")
    norm_epsilon: float = setting(1e-5, "added to the variance inside a norm")

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of the keys and of the values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feedforward_size(self) -> int:
        """Inner width of the MLP."""
        return 4 * self.hidden if self.feedforward is None else self.feedforward

    @property
    def parameters(self) -> int:
        """Exact number of trainable parameters, with the vocabulary unpadded.

        For a GPT this is 2104.04473 equation 2 plus the final layer norm's 2 * hidden, which that equation leaves out.
        """
        bias = int(self.biases)
        norm = self.hidden * (1 + (bias if self.norm == "layernorm" else 0))
        query_key_value = self.hidden + 2 * self.key_value_heads * self.head_size
        attention = (self.hidden + bias) * query_key_value + (self.hidden + bias) * self.hidden
        into_mlp = 2 if self.activation == "swiglu" else 1
        mlp = into_mlp * (self.hidden + bias) * self.feedforward_size + (self.feedforward_size + bias) * self.hidden
        position_table = self.sequence_length * self.hidden if self.positions == "learned" else 0
        token_tables = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * (attention + mlp + 2 * norm) + position_table + token_tables + norm


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model and its batch are laid over data * context * pipe * tensor devices (2104.04473 section 3)."""

    data: int = setting(1, "data-parallel replicas; each takes global_batch_size / data samples of a step")
    pipe: int = setting(1, "pipeline stages (ranks) the layers are split over")
    tensor: int = setting(1, "devices each layer's matrices are split over; keep within one host's fast links")
    context: int = setting(
        1, "devices that share a sample's sequence, attention going round a ring; neighbours on the mesh's data axis"
    )
    chunks: int = setting(
        1, "model chunks per pipeline rank: 2 for zb_v and dualpipe_v, any for interleaved ones, else 1"
    )
    schedule: str = setting(
        "interleaved_1f1b",
        "order of the pipeline's forwards and backwards; or a .csv or .json file that has it",
        (
            *("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs"),
            *("zb_h1", "zb_h2", "zb_1p_interleaved", "zb_v", "dualpipe_v", "auto", "pipedream_2bw"),
        ),
    )
    group_size: int | None = setting(
        None, "interleaved_1f1b: microbatches through a chunk before the next chunk's turn; pipe if not given"
    )
    live_chunks: int | None = setting(None, "auto: chunk activations a rank may hold at once; any number if not given")
    microbatch_size: int = setting(1, "samples a replica runs forward at once")
    sequence_parallel: bool = setting(True, "split norms, dropout and residuals by sequence over tensor (2205.05198)")
    vocab_parallel: str = setting(
        "pipe",
        "devices that share embedding and head: all of pipe * tensor, or, as in Megatron-LM, each end's tensor group",
        ("pipe", "tensor"),
    )
    zero: int = setting(
        0,
        "what data-parallel replicas share out: 0 nothing; 1 optimizer state and fp32 weights; 3 weights and gradients too",
        (0, 1, 3),
    )
    recompute: str = setting(
        "selective",
        "what the backward computes again: nothing, the attention core (selective), or the whole block (full)",
        ("none", "selective", "full"),
    )
    recompute_blocks: int = setting(
        1, "full recompute: blocks that are computed again together, with one input stashed for all of them"
    )
    unroll_blocks: bool = setting(
        False, "each block's weights an array of its own, which matmuls need not copy; compiles many times as long"
    )
    offload_activations: bool = setting(
        False, "keep what forwards save for their backwards in host memory; each block's part moves on its own"
    )
    attention: str = setting(
        "auto",
        "attention's implementation; auto is cudnn where GPUs have it for the model's heads, else xla",
        ("auto", "xla", "cudnn"),
    )
    tensor_overlap: str = setting(
        "none",
        "ring: a tensor group's matmuls are cut up, and pass their communication round a ring meanwhile",
        ("none", "ring"),
    )
    axis_order: tuple[str, ...] = setting(
        ("data", "pipe", "tensor"), "mesh axes, outermost first; the last one's neighbours are on the fastest links"
    )

    @property
    def vocabulary_shares(self) -> int:
        """Devices that the token tables' rows are split over."""
        return self.tensor * (self.pipe if self.vocab_parallel == "pipe" else 1)

    @property
    def devices(self) -> int:
        """Devices the mesh needs."""
        return self.data * self.context * self.pipe * self.tensor

    @property
    def rings(self) -> tuple[str, ...]:
        """The options that make a block send round a ring of devices."""
        tensor = self.tensor_overlap == "ring" and self.tensor > 1
        return (*(["context"] if self.context > 1 else []), *(["tensor_overlap"] if tensor else []))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation: batch, AdamW, learning rate, precision. Defaults are GPT-3's (2005.14165, appendix B)."""

    global_batch_size: int = setting(64, "samples in a step, over all replicas and microbatches")
    batch_ramp: tuple[int, ...] = setting(
        (),
        "START,INCREMENT,SAMPLES: the batch grows from START by INCREMENT to global_batch_size in equal shares of the "
        "first SAMPLES (2104.04473's runs); none: global_batch_size from the first step",
    )
    steps: int = setting(
        200, "steps of global_batch_size to train for; with a batch_ramp as many samples in more steps"
    )
    learning_rate: float = setting(6e-4, "peak learning rate, reached after the warm-up")
    minimum_learning_rate: float = setting(6e-5, "learning rate where the decay ends, by default at the last step")
    learning_rate_decay: str = setting(
        "cosine",
        "how the learning rate comes down after the warm-up; wsd stays at the peak and falls in a cool-down at the end",
        ("cosine", "linear", "constant", "inverse_square_root", "wsd"),
    )
    warmup_steps: int = setting(20, "steps of global_batch_size over which the learning rate rises linearly from zero")
    warmup_samples: int | None = setting(None, "the same in samples; not given: warmup_steps * global_batch_size")
    decay_samples: int | None = setting(None, "samples after which the decay has ended; not given: all of the run")
    cooldown_samples: int | None = setting(None, "wsd only: length of its cool-down; not given: a tenth of the decay")
    cooldown: str = setting(
        "linear", "wsd only: shape of its cool-down", ("linear", "cosine", "exponential", "square_root")
    )
    weight_decay: float = setting(0.1, "AdamW's decoupled decay; biases and norms are not decayed")
    start_weight_decay: float | None = setting(
        None, "weight decay at the start, which becomes weight_decay over the run; not given: the same all along"
    )
    weight_decay_ramp: str = setting("linear", "how it gets from the one to the other", ("linear", "cosine"))
    beta1: float = setting(0.9, "Adam's decay of the mean gradient")
    beta2: float = setting(0.95, "Adam's decay of the mean squared gradient")
    epsilon: float = setting(1e-8, "added to the root of Adam's mean square")
    clip_norm: float | None = setting(1.0, "largest global norm of the gradient; a larger one is scaled down to it")
    seed: int = setting(1234, "seed of the weights, the dropout masks and the order of the samples")
    precision: str = setting("bf16", "type of the forward and backward; weights stay fp32", ("bf16", "fp32", "fp16"))
    matmul_dtype: str | None = setting(
        None,
        "data type of the matmuls with the blocks' weights; not given: --precision's; fp8: E4M3 forward, E5M2 for "
        "gradients (install megajax[fp8])",
        ("bf16", "fp8"),
    )
    initial_loss_scale: float = setting(65536.0, "fp16 only: the loss is multiplied by this at first")
    loss_scale_window: int = setting(1000, "fp16 only: steps without overflow after which the loss scale doubles")
    nonfinite: str = setting(
        "stop",
        "bf16 and fp32: what to do where the loss or gradient is not finite: stop, or skip the batch and go on",
        ("stop", "skip"),
    )
    nonfinite_limit: int = setting(20, "so many skipped steps in a row stop the run, whatever the precision")
    spike_deviations: float = setting(8.0, "a loss so many standard deviations above the last 100 steps' is flagged")
    log_every: int = setting(10, "steps between two lines of the log")
    validation_every: int = setting(100, "steps between two validations; there is always one after the last step")
    validation_batches: int = setting(8, "global batches in a validation")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run. Names and meanings are Megatron-LM's."""

    text: str | None = None
    data_path: tuple[str, ...] | None = None
    train_data_path: tuple[str, ...] | None = None
    valid_data_path: tuple[str, ...] | None = None
    split: str | None = None
    data_cache: str | None = None
    tokenizer: str = "byte"
    end_of_document: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()

    @property
    def total_samples(self) -> int:
        """Samples of the whole run."""
        return self.train.steps * self.train.global_batch_size

    @property
    def microbatches(self) -> int:
        """Microbatches each replica runs in a (full) step: m of the pipeline papers."""
        return self.train.global_batch_size // (self.parallel.microbatch_size * self.parallel.data)

    def validate(self, device_count: int | None = None) -> None:
        """Checks every field, alone and against the others.

        Args:
            device_count: devices the mesh must use, all of them; None leaves that unchecked.

        Raises:
            ConfigError: for the first thing wrong: the field, its value, what is legal and what to type.
        """
        check_run(self, device_count)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """What a run leaves behind, and when it stops before its end. Nothing here changes a number that it computes."""

    run_dir: str | None = setting(None, "directory of the run: checkpoints, logs, configuration; not given: none kept")
    resume: str = setting(
        "no", "auto: go on from run_dir's newest checkpoint, if there is one; STEP: from that; DIR: from another run's"
    )
    save_every: int = setting(1000, "steps between two checkpoints; there is always one at the end and at a stop")
    max_to_keep: int = setting(3, "newest checkpoints to keep")
    keep_every: int | None = setting(None, "checkpoints of steps that are multiples of this are kept for good")
    exit_after_minutes: float | None = setting(None, "save and exit with code 0 after so long; not given: at the end")
    log_jsonl: str | None = setting(
        None,
        "write one JSON object a step to this file, replacing it; a resumed run appends (not given: log.jsonl in run_dir)",
    )
    tensorboard: bool = setting(True, "write run_dir/tensorboard")
    profile: str | None = setting(None, "START:STOP: write a jax.profiler trace of these steps to run_dir/profile")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the processes of a run find each other, and when they give up on one."""

    launcher: str = setting(
        "auto",
        "who started the processes; auto looks for SLURM's, MPI's and Kubernetes' marks, and for --coordinator",
        ("auto", "single", "slurm", "mpi", "kubernetes", "flags"),
    )
    coordinator: str | None = setting(None, "HOST:PORT of process 0, reachable from all")
    processes: int | None = setting(None, "number of processes")
    process_id: int | None = setting(None, "which of them this is, from 0")
    start_timeout: float = setting(300.0, "seconds to wait for the other processes at the start")
    peer_timeout: float = setting(300.0, "seconds without a sign of life or a step after which the job is ended")


def padded_vocabulary(vocabulary: int, shares: int) -> int:
    """The next multiple of lcm(128, shares): rows split evenly, and the logits' matmul has whole tiles."""
    multiple = math.lcm(128, shares)
    return -(-vocabulary // multiple) * multiple


PRESETS: dict[str, ModelConfig] = {name: ModelConfig(name=name, **fields) for name, fields in MODELS.items()}
PRESETS.update({alias: PRESETS[name] for alias, name in ALIASES.items()})


def preset(name: str) -> ModelConfig:
    """The published model called `name`.

    Raises:
        ConfigError: there is none; the message names the near matches.
    """
    if name not in PRESETS:
        raise ConfigError(f"model = {name!r} is not a preset: {near(name, PRESETS)} Type --model NAME.")
    return PRESETS[name]
