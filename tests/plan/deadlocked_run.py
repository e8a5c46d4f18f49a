"""A run of a model of one's own whose step would hang on two stages: for `megajax.plan.dryrun --run`."""

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.models.interface import register_model
from tests.train.test_deadlocks import Moving, MovingConfig

register_model(MovingConfig)(Moving)
RUN = RunConfig(
    MovingConfig(block="roll"),
    ParallelConfig(pipe=2, tensor=2, microbatch_size=2),
    TrainConfig(global_batch_size=8, steps=2, warmup_steps=1, precision="bf16"),
)
