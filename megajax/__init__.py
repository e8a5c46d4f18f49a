"""megajax: training of large transformers in JAX with tensor, pipeline and data parallelism, one jitted program a step.

The names below are imported on first use: `import megajax` imports neither jax nor numpy.
"""

import importlib

__version__ = "0.1.0"

_MODULES = {
    "ConfigError": "megajax.config",
    "DataConfig": "megajax.config",
    "LaunchConfig": "megajax.config",
    "BertConfig": "megajax.config",
    "ModelConfig": "megajax.config",
    "OutputConfig": "megajax.config",
    "ParallelConfig": "megajax.config",
    "RunConfig": "megajax.config",
    "TrainConfig": "megajax.config",
    "preset": "megajax.config",
    "AxisRules": "megajax.sharding.rules",
    "ModelContext": "megajax.models.interface",
    "NNXModel": "megajax.models.nnx_model",
    "PipelineModel": "megajax.models.interface",
    "register_model": "megajax.models.interface",
    "OptimizerContext": "megajax.ops.optimizers.context",
    "SamplesSchedule": "megajax.train.lr_schedule",
    "Schedule": "megajax.schedules.schedule",
    "make_schedule": "megajax.schedules.registry",
    "register": "megajax.schedules.registry",
    "Callback": "megajax.train.callbacks",
    "Control": "megajax.train.callbacks",
    "Samples": "megajax.data.user_samples",
    "Trainer": "megajax.train.trainer",
    "check": "megajax.train.check",
    "pipelined_forward": "megajax.train.pipelined",
    "pipelined_loss": "megajax.train.pipelined",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    """Imports a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megajax' has no attribute {name!r}: it exports {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
