# What type checkers see: megajax/__init__.py imports these names on their first use.
from megajax.config import BertConfig as BertConfig
from megajax.config import ConfigError as ConfigError
from megajax.config import DataConfig as DataConfig
from megajax.config import LaunchConfig as LaunchConfig
from megajax.config import ModelConfig as ModelConfig
from megajax.config import OutputConfig as OutputConfig
from megajax.config import ParallelConfig as ParallelConfig
from megajax.config import RunConfig as RunConfig
from megajax.config import TrainConfig as TrainConfig
from megajax.config import preset as preset
from megajax.data.user_samples import Samples as Samples
from megajax.models.interface import ModelContext as ModelContext
from megajax.models.interface import PipelineModel as PipelineModel
from megajax.models.interface import register_model as register_model
from megajax.models.nnx_model import NNXModel as NNXModel
from megajax.ops.optimizers.context import OptimizerContext as OptimizerContext
from megajax.schedules.registry import make_schedule as make_schedule
from megajax.schedules.registry import register as register
from megajax.schedules.schedule import Schedule as Schedule
from megajax.sharding.rules import AxisRules as AxisRules
from megajax.train.callbacks import Callback as Callback
from megajax.train.callbacks import Control as Control
from megajax.train.check import check as check
from megajax.train.lr_schedule import SamplesSchedule as SamplesSchedule
from megajax.train.pipelined import pipelined_forward as pipelined_forward
from megajax.train.pipelined import pipelined_loss as pipelined_loss
from megajax.train.trainer import Trainer as Trainer

__version__: str
