"""`Trainer`: a run from its configuration to its final state, with checkpoints, resume, logs, validation and profiling.

    from megajax import DataConfig, ModelConfig, ParallelConfig, RunConfig, Trainer, TrainConfig, preset

    run = RunConfig(preset("tiny"), ParallelConfig(data=4, pipe=2, tensor=1), TrainConfig(steps=100))
    result = Trainer(run).fit()
    print(result.metrics["loss"])

`experiments/own_model.py` trains a model and batches of the user's.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import jax

from megajax.config import ConfigError, ModelConfig, OutputConfig, RunConfig
from megajax.config.cli import Request
from megajax.config.compare import changed_options, library_defaults
from megajax.config.errors import near
from megajax.data.prefetch import Prefetch
from megajax.data.source import open_data
from megajax.estimate.auto import resolved_layout
from megajax.estimate.gpus import Peak, device_peak, gpu_of
from megajax.pipeline.trained import merge, split
from megajax.runtime.mesh import make_mesh
from megajax.runtime.preemption import Preemption
from megajax.runtime.watchdog import Watchdog, is_peer_error
from megajax.schedules.errors import counted
from megajax.train.callbacks import Callbacks, Control, Result, check_callbacks
from megajax.train.check import model_to_check
from megajax.train.goodput import NAME, Goodput
from megajax.train.loop import Progress, TrainerHooks, train
from megajax.train.lr_schedule import SamplesSchedule, Schedule, rate_of
from megajax.train.optimizer import MakeOptimizer
from megajax.train.replica_check import Checks
from megajax.train.run_directory import RunDirectory
from megajax.train.same_run import own_classes, require_same_run
from megajax.train.state import TrainState, started
from megajax.train.step import Training, make_training
from megajax.train.user_batches import user_data
from megajax.train.validation import Evaluation

PARTS = ("model", "data", "rules", "optimizer", "schedule")  # what `OwnParts` replaces, beside the validation's data


class OwnParts(TypedDict, total=False):
    """Arguments of a `Trainer` that replace what the configuration selects; each may be left out, or None.

    Attributes:
      model: the PipelineModel's class; None: the one that is registered for the type of `run.model`.
      data: the training samples: anything with an index and a length, or that can be iterated, or a function that
        returns an iterator (docs/data.md#data-of-ones-own). Its items are dicts of arrays, of one sample or of several;
        `Samples` says how often they are read, and where their state is. Or the batches: `batch(consumed_samples)`
        returns a dict of arrays [microbatches, samples a microbatch, ...] with the run's batch size. None: `run.data`.
      validation_data: the same of validation, if `data` is given, or of several sets by name; None: no validation.
      rules: the sharding rules; None: the model's.
      optimizer: `optimizer(context)` returns an optax.GradientTransformation; `context` is an `OptimizerContext`. None:
        that of `run.train`.
      schedule: the learning rate, a function of the number of updates before this one, such as optax's schedules; or a
        `SamplesSchedule`, a function of the samples. Skipped steps count in neither. None: that of `run.train`.
    """

    model: type | None
    data: Any
    validation_data: Any
    rules: Any
    optimizer: MakeOptimizer | None
    schedule: Schedule | SamplesSchedule | None


class Trainer:
    """Trains a run's model on its devices.

    Attributes:
      run, output, request: the configuration, and the command line that it is from.
      data: of the run.
      tokenizer: of the run's text; None with batches of the user's.
      directory: the files that the run writes.
      mesh, training: the device mesh, and the compiled programs.
      callbacks: as given.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        output: OutputConfig | Request = OutputConfig(),  # noqa: B008 (frozen)
        callbacks: Sequence[Any] = (),
        devices: Sequence[jax.Device] | None = None,
        **own: Unpack[OwnParts],
    ):
        """Validates the configuration and builds the programs; nothing is compiled before the first step.

        Args:
          run: what to train, on which mesh, how long, on which data.
          output: the files that the run writes, and when it stops early; or the command line that configured the run, for
            its config.toml and the log's first lines.
          callbacks: called between the steps, in this order: objects with some of the methods of `Callback`.
          devices: None: all that jax has.
          own: model, data, validation_data, rules, optimizer, schedule: see `OwnParts`.

        Raises:
          ConfigError: the configuration is not legal, or its data cannot be read.
          TypeError: there is no such argument.
        """
        for name in own.keys() - OwnParts.__annotations__.keys():
            raise TypeError(f"Trainer has no argument {name}: {near(name, OwnParts.__annotations__)}")
        model, data, rules, optimizer, schedule = (own.get(name) for name in PARTS)
        check_callbacks(callbacks)
        devices = jax.devices() if devices is None else devices
        rate_at = rate_of(run.train, schedule) if schedule else None
        run.validate(len(devices))
        self.run = run = resolved_layout(run, gpu_of(devices[0]))
        self.callbacks = tuple(callbacks)
        self.request, self._fitted = output if isinstance(output, Request) else None, False
        self.output = output = output.output if isinstance(output, Request) else output
        if data is None:
            if run.train.distill_weight:
                raise ConfigError(
                    "distill_weight needs batches with teacher_ids and teacher_logits, which no text has: pass "
                    "Trainer(data=...) in Python, or omit --distill-weight."
                )
            self.data = open_data(run)
        else:
            self.data = user_data(data, own.get("validation_data"), run, model_to_check(run, model, rules))
        self.tokenizer = self.data.tokenizer
        require_same_run(run, output, self.data.loaders, self.tokenizer, own_classes(model, data, optimizer, schedule))
        self.directory = RunDirectory(run, output, self.tokenizer, self.request)
        self.mesh = make_mesh(run.parallel, devices)
        self.training = make_training(run, self.mesh, model, rules, optimizer, rate_at)
        if schedule:
            name = own_classes(None, None, schedule=getattr(schedule, "function", schedule))["the schedule's function"]
            unit = "samples" if isinstance(schedule, SamplesSchedule) else "updates"
            self.directory.messages.append(f"rate      {name}, of the {unit}")

    def fit(
        self,
        watchdog: Watchdog | None = None,
        started: float | None = None,
        initial_params: Callable[[str, Training], Any] | None = None,
        evaluations: Sequence[Evaluation] = (),
    ) -> Result:
        """Trains until the last step, or until a signal or `output.exit_after_minutes`; resumes first if `output` says so.

        Call it in the main thread, which receives the signals.

        Args:
          watchdog: ends the job if another process dies or hangs.
          started: `time.monotonic()` from which `exit_after_minutes` counts; None: now.
          initial_params: reads the parameters of `run.train.init_from` onto the run's devices, if nothing is resumed
            (`megajax.interop.hugging_face.read_model.initial_params`).
          evaluations: what is measured during the training besides the loss of the validation sets.

        Raises:
          ConfigError: the checkpoint to resume from is damaged or of another model, the data ended, the run's last
            checkpoint could not be written, a step was not finite (see `loop.train`), or `fit` was called before.
          ReplicasDiffer: a check of `output.check_every` found devices whose copies of the state differ.
          Exception: of a callback.
        """
        if self._fitted:
            raise ConfigError(
                "Trainer.fit was called before, and would start again from step 0: make a new Trainer; with "
                'OutputConfig(run_dir=DIR, resume="auto") it resumes, and TrainConfig(steps=...) may be larger.'
            )
        self._fitted = True
        try:
            return self._fit(watchdog, started, initial_params, evaluations)
        finally:
            self.directory.finish()

    def _fit(
        self,
        watchdog: Watchdog | None,
        started: float | None,
        initial_params: Callable[[str, Training], Any] | None,
        evaluations: Sequence[Evaluation],
    ) -> Result:
        """See `fit`."""
        goodput = self._goodput(started)
        devices = self.mesh.devices.flatten().tolist()
        # CPU devices share the cores with one another and with all else that runs: no figure is a peak
        peak = device_peak(devices, self.run.train.precision) if devices[0].platform != "cpu" else None
        resume = self._resumed_state(initial_params) or self._imported_state(initial_params)
        self.directory.connect_data(self.data.batches, resume[1] if resume else None)
        minutes = self.output.exit_after_minutes
        with (
            self.directory.open_log(resume[1] if resume else Progress()) as log,
            Preemption(minutes, started, interrupt=self.output.run_dir is not None) as preemption,
        ):
            checks = Checks(self.output.check_every, self.training.state_layout) if self.output.check_every else None
            checked = [checks.describe()] if checks else []
            for line in (*self.describe(peak), *checked, *self._changed(), *self.directory.messages):
                log.message(line)
            files = self.directory
            control = Control(self.run, files.directory, preemption, log)
            tracker = [log.tracker] if log.tracker else []
            callbacks = Callbacks([*self.callbacks, *tracker], control, goodput, watchdog)
            hooks = TrainerHooks(
                files.checkpoints, preemption, files.profiler, watchdog, checks, files.replicas, evaluations, callbacks
            )
            loop = {"resume": resume, "hooks": hooks, "goodput": goodput}
            try:
                with Prefetch(self.data.batches, self.training.batch_sharding) as batches:
                    state, metrics = train(self.training, batches, self.data.validation, log, peak, **loop)
                log.message(f"waited {batches.waited:.2f} s for data, the first batch included")
                metrics = metrics or files.last_record(resume[1].step if resume else 0)
                result = Result(state, metrics, preemption.reason)
                callbacks.end(result)
            except BaseException as error:
                # A save in progress needs the other processes: without them nothing is waited for.
                alone = jax.process_count() > 1 and is_peer_error(error)
                for text in (*files.close(wait=not alone), *callbacks.failed(error)):
                    log.message(text)
                raise
            else:
                for text in files.close():
                    log.message(text)
            finally:
                goodput.write()
                if hasattr(self.data.batches, "close"):  # the processes of a stream
                    self.data.batches.close()
            log.message(goodput.describe())
        return result

    def _resumed_state(self, read: Callable[[str, Training], Any] | None) -> tuple[TrainState, Progress] | None:
        """The state to resume from; of adapters, with the model of `init_from`. None: there is none."""
        resume = self.directory.resume(self.training)
        if resume is None or jax.tree.structure(resume[0].params) == jax.tree.structure(self.training.params_sharding):
            return resume
        state, progress = resume
        base = split(self._read_params(read), self.training.trained)[1]
        return dataclasses.replace(state, params=merge(state.params, base)), progress

    def _read_params(self, read: Callable[[str, Training], Any] | None) -> Any:
        """The parameters of `init_from`."""
        source = self.run.train.init_from
        if read is None:
            raise ConfigError(f"init_from = {source}, but nothing reads it: pass initial_params to Trainer.fit.")
        self.directory.messages.append(f"weights   from {source}")
        return read(source, self.training)

    def _imported_state(self, read: Callable[[str, Training], Any] | None) -> tuple[TrainState, Progress] | None:
        """A fresh state with the parameters of `init_from`; None without that option."""
        if self.run.train.init_from is None:
            return None
        state = self.training.init_state()
        jax.tree.map(lambda leaf: leaf.delete(), (state.params, state.ema))  # their memory is needed
        state = dataclasses.replace(state, params=self._read_params(read), ema=())
        return started(self.run.train, state, self.training.only_trained(state.params)), Progress()

    def _goodput(self, started: float | None) -> Goodput:
        """The account of the run's time, which process 0 writes."""
        directory = self.directory.directory
        path = directory / NAME if directory and jax.process_index() == 0 else None
        return Goodput(started, path, keep=self.output.resume != "no")

    def describe(self, peak: Peak | None) -> list[str]:
        """The run in a few lines: model, mesh, attention, schedule, data, and the peak FLOP/s that MFU refers to, if any."""
        run, model, parallel = self.run, self.run.model, self.run.parallel
        devices = self.mesh.devices
        size = ""
        if isinstance(model, ModelConfig):
            size = f", hidden {model.hidden}, {counted(model.heads, 'head')}, {model.sequence_length} tokens a sample"
            if model.experts:
                size += f", {model.experts} experts, {model.active_parameters:,} parameters for a token"
        context = f"context {parallel.context} x " if parallel.context > 1 else ""
        members = "tensor ranks" if parallel.experts_over_tensor else "replicas"
        groups = f", experts split over groups of {parallel.expert} {members}" if parallel.expert > 1 else ""
        sequence_parallel = "on" if parallel.sequence_parallel and parallel.tensor > 1 else "off"
        reference = f"{peak.flops / 1e12:.3g} TFLOP/s a device ({peak.source}), to which MFU refers" if peak else ""
        return [
            f"model     {model.name}: {count_parameters(self.training):,} parameters, "
            f"{counted(model.layers, 'layer')}{size}",
            *self._trained(),
            f"mesh      data {parallel.data} x {context}pipe {parallel.pipe} x tensor {parallel.tensor} on "
            f"{counted(devices.size, f'{devices.flat[0].device_kind} device')}, {run.train.precision}, "
            f"sequence parallel {sequence_parallel}, recompute {parallel.recompute}{groups}",
            *self.training.program.describe(),
            f"steps     {run.train.steps} of {counted(run.train.global_batch_size, 'sample')}",
            *(f"data      {line}" for line in self.data.description),
            *([f"peak      {reference}"] if peak else []),
        ]

    def _trained(self) -> list[str]:
        """A line with the number of parameters that are trained, if some are frozen."""
        if self.training.trained is None:
            return []
        model, tokens = self.training.model, getattr(self.run.model, "vocabulary", None)
        unpadded = lambda names, leaf: (  # noqa: E731
            leaf.size // leaf.shape[names.index("vocabulary")] * tokens
            if tokens and "vocabulary" in names
            else leaf.size
        )
        is_names = lambda node: isinstance(node, tuple)  # noqa: E731
        shapes = jax.eval_shape(model.init, jax.random.key(0))  # without empty slots
        sizes = jax.tree.map(unpadded, model.logical_axes(), shapes, is_leaf=is_names)
        own, every = (sum(jax.tree.leaves(tree)) for tree in (self.training.only_trained(sizes), sizes))
        return [f"trained   {own:,} of {every:,} parameters ({own / every:.3%}), all others are frozen"]

    def _changed(self) -> list[str]:
        """A line with the options that differ from the defaults, if any do."""
        run, output, request = self.run, self.output, self.request
        defaults = library_defaults(run), OutputConfig()
        changed = request.changed(run) if request else changed_options(run, output, *defaults)
        return [f"config    {changed}"] if changed else []


def count_parameters(training: Any) -> int:
    """Trainable parameters of the run's model, for a transformer without the vocabulary's padding."""
    if isinstance(training.run.model, ModelConfig):
        return training.run.model.parameters
    return sum(leaf.size for leaf in jax.tree.leaves(training.state_shapes.params))
