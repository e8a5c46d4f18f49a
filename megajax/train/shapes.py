"""`--dry-shapes`: what every parameter is and where it lies, without a device and without allocating."""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from megajax.config import RunConfig
from megajax.models.context import model_rules, model_shapes
from megajax.pipeline.parameters import initial_params, parameter_specs
from megajax.runtime.mesh import AXES


def describe_shapes(run: RunConfig) -> str:
    """A table of all parameters (shape as stored, sharding, bytes on one device) and what a device holds in all.

    Stored shapes of blocks are [chunks, pipe, layers per chunk, ...]. Bytes are of the fp32 parameters; AdamW's two
    moments and the gradient accumulators have the same shapes and shardings.
    """
    parallel = run.parallel
    sizes = (parallel.data * parallel.context, parallel.pipe, parallel.tensor)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    model = model_shapes(run)
    shapes = jax.eval_shape(lambda key: initial_params(model, parallel, key), jax.random.key(0))
    specs = parameter_specs(model, parallel, model_rules(run)).stored
    rows = [("parameter", "shape", "sharding", "bytes per device")]
    total = 0
    for (path, shape), spec in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs), strict=True):
        local = NamedSharding(mesh, spec).shard_shape(shape.shape)
        bytes_here = math.prod(local) * shape.dtype.itemsize
        total += bytes_here
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rows.append((name, f"{shape.dtype}{list(shape.shape)}", str(tuple(spec)), f"{bytes_here:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(row[column].ljust(width) for column, width in enumerate(widths)), row[3].rjust(18)])
        for row in rows
    ]
    return "\n".join(
        [
            f"{run.model.name}: {run.model.parameters:,} parameters on "
            f"data {parallel.data * parallel.context} x pipe {parallel.pipe} x tensor {parallel.tensor} = "
            f"{parallel.devices} devices",
            *lines,
            f"a device holds {total / 1e9:.3f} GB of parameters (fp32), {2 * total / 1e9:.3f} GB of AdamW's moments and "
            f"{total / 1e9:.3f} GB of gradients: {4 * total / 1e9:.3f} GB",
        ]
    )
