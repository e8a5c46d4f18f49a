"""A run's layers by kind, such as dense and sparse ones: the same run with a model whose layers are all of one kind.

`kept.kept_of_block` and `step_time.layer_times` describe a block of a model with equal layers. A rank's memory is the sum
over its kinds of layers, each times the slots that a chunk has for it: the most layers of the kind on any stage, since all
ranks run one program (`pipeline/stage.py`). Its time is that of the layers that a stage has; a pipeline's is that of the
slowest stage. A model with equal layers has one kind, whose slots all take time.
"""

import dataclasses
import functools
from typing import Any

from megajax.config import RunConfig
from megajax.config.layer_kinds import layer_kinds
from megajax.config.mtp import mtp_block
from megajax.estimate import model_costs
from megajax.schedules.stages import StageLayers


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The layers of one kind: the run with a model all of whose layers are of it, and the slots of a chunk."""

    run: RunConfig
    slots: int

    @property
    def rank_slots(self) -> int:
        """Slots of a rank."""
        return self.run.parallel.chunks * self.slots


def layers_of_kinds(run: RunConfig) -> tuple[LayerKind, ...]:
    """The kinds of layers of a run's model; one of a kind if they are alike."""
    if not layer_kinds(run.model):
        return (LayerKind(run, run.parallel.stage_layers(run.model.layers).slots),)
    models, slots, _ = _by_kind(run.model, _layers(run))
    return tuple(
        LayerKind(dataclasses.replace(run, model=model), count) for model, count in zip(models, slots, strict=True)
    )


def modules_run(run: RunConfig) -> RunConfig | None:
    """A run whose layers are the blocks of multi-token prediction, which recompute nothing; None: there are none."""
    further = model_costs(run.model).further
    if further is None:
        return None
    alone = {
        "pipe": 1,
        "chunks": 1,
        "schedule": "1f1b",
        "pipeline_layout": None,
        "group_size": None,
        "live_chunks": None,
    }
    model = dataclasses.replace(mtp_block(run.model), layers=further.layers)
    return dataclasses.replace(run, model=model).with_layout(**alone, recompute="none", recompute_blocks=1, zero=0)


def stage_layer_counts(run: RunConfig) -> tuple[tuple[int, ...], ...]:
    """Blocks that stages run, of each kind in the order of `layers_of_kinds`; each combination once."""
    if not layer_kinds(run.model):
        return ((run.parallel.stage_layers(run.model.layers).slots,),)
    return _by_kind(run.model, _layers(run))[2]


def _layers(run: RunConfig) -> StageLayers:
    return run.parallel.stage_layers(run.model.layers, kinds=layer_kinds(run.model))


@functools.lru_cache(maxsize=256)  # a search repeats the call for each schedule, recompute mode and microbatch size
def _by_kind(model: Any, where: StageLayers) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The models of each kind, the slots of a chunk for each, and the layers of each kind on different stages."""
    kinds = [where.of(kind) for kind in where.kind_names]
    models = tuple(model.of_kind(kind) for kind in where.kind_names)
    stages = sorted(set(zip(*(kind.counts for kind in kinds), strict=True)))
    return models, tuple(kind.slots for kind in kinds), tuple(stages)
