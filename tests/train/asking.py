"""experiments.gpt3 with a callback: process 1 asks for a checkpoint after a step and, once it is saved, for a stop."""

import functools
import sys

import jax

from experiments import gpt3
from megajax import Callback
from megajax.train import trainer


class Ask(Callback):
    """See above; every process prints the checkpoints of which it is told."""

    def on_step(self, control, record):
        if jax.process_index() == 1 and record["step"] == 5:
            control.save()

    def on_save(self, control, step, path):
        print(f"process {jax.process_index()} was told of step {step}", flush=True)
        if jax.process_index() == 1:
            control.stop("process 1 has enough")

    def on_end(self, control, result):
        print(f"process {jax.process_index()} ends: {result.stopped}", flush=True)


if __name__ == "__main__":
    trainer.Trainer = functools.partial(trainer.Trainer, callbacks=[Ask()])
    sys.exit(gpt3.main())
