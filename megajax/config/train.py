"""The optimisation: batch, optimizer, learning rate, precision."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError, divisors, option
from megajax.config.fields import check_fields, setting

NOT_IN_OPTAX = ("soap", "shampoo")  # optimizers that people ask for
# Of a batch ramp; GPT-3's has 98. The programs to compile are chosen in time and memory quadratic in this number.
MOST_BATCH_SIZES = 1024


def _in_8_bits(description: str):
    return setting(None, description, ("bf16", "fp8"), shown_default="--precision's")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimisation: batch, optimizer, learning rate, precision. Defaults are GPT-3's (2005.14165, appendix B)."""

    global_batch_size: int = setting(64, "samples in a step, over all replicas and microbatches")
    batch_ramp: tuple[int, ...] = setting(
        (),
        "batch size ramp-up: from START by INCREMENT to global_batch_size, each size for an equal share of the first "
        "SAMPLES (2104.04473); none: global_batch_size from the first step",
        metavar="START,INCREMENT,SAMPLES",
    )
    steps: int = setting(
        200, "steps of global_batch_size to train for; with a batch_ramp, the same samples in more steps"
    )
    optimizer: str = setting(
        "adamw",
        "adamw; lion; adafactor, whose learning rate is relative to the size of an array; muon, on the matrices of layers, "
        "with AdamW on all else",
        ("adamw", "lion", "adafactor", "muon"),
    )
    learning_rate: float = setting(6e-4, "peak learning rate, reached after the warm-up")
    lr_multiplier: tuple[str, ...] = setting(
        (),
        "learning rate of the parameters that PATTERN matches, in units of the run's: blocks/attention=0.1, '*/bias=2'; may "
        "be repeated, and the last one that matches counts; --dry-shapes prints the parameters",
        metavar="PATTERN=NUMBER",
        list_style="repeat",
    )
    minimum_learning_rate: float = setting(6e-5, "learning rate at the end of the decay", low=0)
    learning_rate_decay: str = setting(
        "cosine",
        "shape of the decay after the warm-up; wsd stays at the peak until a cool-down at the end",
        ("cosine", "linear", "constant", "inverse_square_root", "wsd"),
    )
    warmup_steps: int = setting(
        20, "steps of global_batch_size in which the learning rate rises linearly from zero", low=0
    )
    warmup_samples: int | None = setting(None, "the warm-up in samples", low=0, shown_default="warmup_steps")
    decay_samples: int | None = setting(None, "samples until the end of the decay", shown_default="the whole run")
    cooldown_samples: int | None = setting(
        None, "wsd: samples of the cool-down", low=0, shown_default="a tenth of the decay"
    )
    cooldown: str = setting("linear", "wsd: shape of the cool-down", ("linear", "cosine", "exponential", "square_root"))
    weight_decay: float = setting(0.1, "decoupled weight decay; biases and norms are not decayed", low=0)
    no_weight_decay: tuple[str, ...] = setting(
        (),
        "no weight decay of the parameters that PATTERN matches, as lr_multiplier's; may be repeated",
        metavar="PATTERN",
        list_style="repeat",
    )
    start_weight_decay: float | None = setting(
        None, "weight decay at the first step, ramped to weight_decay over the run", low=0, shown_default="weight_decay"
    )
    weight_decay_ramp: str = setting("linear", "shape of the weight decay's ramp", ("linear", "cosine"))
    beta1: float = setting(0.9, "decay of Adam's mean gradient, and of Lion's momentum in the update", low=0, below=1)
    beta2: float = setting(0.95, "decay of Adam's mean squared gradient, and of Lion's momentum", low=0, below=1)
    epsilon: float = setting(1e-8, "added to the root of Adam's mean square")
    muon_momentum: float = setting(0.95, "muon: decay of the momentum of matrices", low=0, below=1)
    muon_rms: float = setting(
        0.2, "muon: scale of a matrix's update, its root mean square in units of the learning rate; 0.2 is like AdamW's"
    )
    clip_norm: float | None = setting(
        1.0, "largest global norm of the gradient; larger gradients are scaled down; none: no clipping"
    )
    ema_decay: float | None = setting(
        None,
        "keep an exponential moving average of the weights, of which each update keeps this part; none: no average",
        low=0,
        below=1,
    )
    ema_validation: bool = setting(
        False, "the validation, --evaluate-every and the text after the training use the averaged weights"
    )
    z_loss: float = setting(
        0.0, "weight of the squared logarithm of a token's softmax sum, added to its loss (2204.02311)", low=0
    )
    label_smoothing: float = setting(
        0.0, "share of a label's probability that all tokens of the vocabulary share (1512.00567)", low=0, below=1
    )
    distill_weight: float = setting(
        0.0,
        "share of a teacher in the loss: its divergence from the teacher_logits of the tokens teacher_ids in the batches",
        low=0,
    )
    distill_temperature: float = setting(
        1.0, "of --distill-weight, by which teacher's and model's logits are divided (1503.02531)"
    )
    distill_top: int = setting(64, "of --distill-weight, tokens of each position that the batches have logits of")
    # jax's keys take 32 bits and would silently drop the rest.
    seed: int = setting(1234, "seed of the weights, the dropout masks and the order of the samples", low=0, below=2**32)
    init_from: str | None = setting(
        None,
        "start from the weights of a Hugging Face model, a directory or ORG/NAME on the Hub; its config.json gives the "
        "model's options that are not passed, and its tokenizer is the default",
        metavar="DIR",
        text_kind="path",
        shown_default="random weights",
    )
    init_adapters: str | None = setting(
        None,
        "start from adapters to init_from's model, a directory with PEFT's adapter_config.json and "
        "adapter_model.safetensors",
        metavar="DIR",
        text_kind="path",
        shown_default="A random, B zero",
    )
    freeze: tuple[str, ...] = setting(
        (),
        "the parameters that PATTERN matches are not trained: blocks/attention, '*/bias'; may be repeated",
        metavar="PATTERN",
        list_style="repeat",
    )
    precision: str = setting(
        "bf16", "data type of the forward and backward pass; weights stay fp32", ("bf16", "fp32", "fp16")
    )
    matmul_dtype: str | None = _in_8_bits(
        "data type of the matmuls with the blocks' weights; fp8: E4M3 forward, E5M2 for gradients (install megajax[fp8])"
    )
    expert_matmul_dtype: str | None = _in_8_bits(
        "data type of experts' matmuls; fp8: E4M3, a scale for each 1 x 128 or 128 x 128, not for weights' gradients"
    )
    expert_dispatch_dtype: str | None = _in_8_bits(
        "data type in which tokens, and gradients of results, are sent to experts; fp8: E4M3 with a scale for each 128"
    )
    initial_loss_scale: float = setting(65536.0, "fp16: initial loss scale")
    loss_scale_window: int = setting(1000, "fp16: steps without overflow after which the loss scale doubles")
    nonfinite: str = setting(
        "stop",
        "bf16 and fp32: what to do when the loss or gradient is not finite: stop the run, or skip the batch",
        ("stop", "skip"),
    )
    nonfinite_limit: int = setting(20, "consecutive skipped steps that stop the run, in any precision")
    spike_deviations: float = setting(
        8.0, "a loss this many standard deviations above the mean of the last 100 steps is flagged"
    )
    log_every: int = setting(10, "steps between two lines of the log")
    validation_every: int = setting(100, "steps between two validations; there is always one after the last step")
    validation_batches: int = setting(8, "global batches in a validation; 0: no validation", low=0)

    @property
    def batch_sizes(self) -> range:
        """Every batch size of the run, ascending: those of the batch ramp, and the global batch size."""
        start, increment, _ = self.batch_ramp or (self.global_batch_size, 1, 0)
        return range(start, self.global_batch_size + 1, increment)

    @property
    def rate_multipliers(self) -> tuple[tuple[str, float], ...]:
        """The pairs of `lr_multiplier`.

        Raises:
            ConfigError: one is not PATTERN=NUMBER.
        """
        found = []
        for text in self.lr_multiplier:
            pattern, _, word = text.rpartition("=")
            try:
                number = float(word)
            except ValueError:
                number = -1.0
            if not pattern or not 0 <= number < 1e6:
                raise ConfigError(
                    f"lr_multiplier = {text} must be PATTERN=NUMBER, with a number from 0: pass --lr-multiplier "
                    "'blocks/attention=0.1' or the like."
                )
            found.append((pattern, number))
        return tuple(found)

    def validate(self) -> None:
        """Checks batch, learning rate and precision by themselves.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        if self.optimizer in NOT_IN_OPTAX:
            raise ConfigError(
                f"optimizer = {self.optimizer} is not in optax: pass --optimizer adamw|lion|adafactor|muon, or one of yours "
                "in Python, Trainer(optimizer=...)."
            )
        check_fields(self)
        self._check_learning_rate()
        self._check_batch_ramp()
        _ = self.rate_multipliers
        if self.ema_validation and self.ema_decay is None:
            raise ConfigError("ema_validation is on, but there are no averaged weights: pass --ema-decay 0.999.")
        if self.distill_weight > 1:
            raise ConfigError(f"distill_weight = {self.distill_weight} is a share: pass --distill-weight 1, or less.")
        for name in ("matmul_dtype", "expert_matmul_dtype", "expert_dispatch_dtype"):
            given = f"{name} = {getattr(self, name)} does not work with precision = {self.precision}"
            if getattr(self, name) == "bf16" != self.precision:
                raise ConfigError(f"{given}: omit {option(name)}.")
            if getattr(self, name) == "fp8" and self.precision == "fp16" and name != "expert_dispatch_dtype":
                raise ConfigError(f"{given}, in which sums of scaled products overflow: pass --precision bf16.")

    def _check_learning_rate(self) -> None:
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"warmup_steps = {self.warmup_steps} is more than steps = {self.steps}: "
                f"pass --warmup-steps {self.steps // 10}, or --steps with a larger number."
            )
        total = self.steps * self.global_batch_size
        if total >= 2**31:
            most = (2**31 - 1) // self.global_batch_size
            raise ConfigError(f"steps * global_batch_size = {total} samples must be below 2**31: pass --steps {most}.")
        warmup, decay = self.warmup_samples or 0, self.decay_samples or total
        if warmup > decay:
            raise ConfigError(
                f"warmup_samples = {warmup} is more than the {decay} samples of the decay: "
                f"pass --warmup-samples {decay // 10}."
            )
        if (self.cooldown_samples or 0) > decay:
            raise ConfigError(
                f"cooldown_samples = {self.cooldown_samples} is more than the {decay} samples of the decay: "
                f"pass --cooldown-samples {decay // 10}."
            )
        if self.minimum_learning_rate > self.learning_rate:
            raise ConfigError(
                f"minimum_learning_rate = {self.minimum_learning_rate} is above learning_rate = {self.learning_rate}: "
                f"pass --minimum-learning-rate {self.learning_rate / 10:g}, or a larger --learning-rate."
            )

    def _check_batch_ramp(self) -> None:
        """START,INCREMENT,SAMPLES reach the global batch within the run; which batches a layout takes is run.py's."""
        if not self.batch_ramp:
            return
        shown = ",".join(map(str, self.batch_ramp))
        if len(self.batch_ramp) != 3 or not all(type(n) is int and n > 0 for n in self.batch_ramp):
            raise ConfigError(
                f"batch_ramp = {shown} must be three whole numbers above 0: pass --batch-ramp START,INCREMENT,SAMPLES."
            )
        start, increment, samples = self.batch_ramp
        batch, total = self.global_batch_size, self.steps * self.global_batch_size
        if start >= batch or (batch - start) % increment:
            raise ConfigError(
                f"batch_ramp = {shown} does not get from {start} to global_batch_size = {batch} in steps of "
                f"{increment}: pass {self.other_ramp(1)}."
            )
        if len(self.batch_sizes) > MOST_BATCH_SIZES:
            steps = next(n for n in divisors(batch - start) if (batch - start) // n < MOST_BATCH_SIZES)
            raise ConfigError(
                f"batch_ramp = {shown} has {len(self.batch_sizes)} batch sizes, and at most {MOST_BATCH_SIZES} are "
                f"legal: pass --batch-ramp {start},{steps},{samples}, or --batch-ramp none."
            )
        if samples > total:
            raise ConfigError(
                f"batch_ramp = {shown} takes {samples} samples, but the run has steps * global_batch_size = {total}: "
                f"pass --batch-ramp {start},{increment},{total // 10 or 1}, or more --steps."
            )

    def other_ramp(self, least: int, multiple: int | None = None) -> str:
        """Remedies for a batch ramp whose START or INCREMENT is illegal.

        Args:
            least: smallest legal START.
            multiple: of START and of INCREMENT; None: the INCREMENT stays.
        """
        _, increment, samples = self.batch_ramp
        step = multiple or increment
        start = self.global_batch_size - max(0, self.global_batch_size - least) // step * step
        if start < self.global_batch_size and (self.global_batch_size - start) // step < MOST_BATCH_SIZES:
            return f"--batch-ramp {start},{step},{samples}, or --batch-ramp none"
        return "--batch-ramp none"
