"""Predicted throughput over mesh shapes, as 2104.04473 draws its figures 13 to 15."""

from collections.abc import Sequence

from megajax.config import ConfigError
from megajax.plan.search import Candidate, best_by


def plot(candidates: Sequence[Candidate], path: str) -> None:
    """Writes a picture of three panels to `path` (.png, .svg or .pdf).

    Each shows the fastest layout of each pair of degrees that fits: pipeline by tensor (figure 13), pipeline by data
    (figure 14) and tensor by data (figure 15). The other panels' third degree takes what GPUs are left.

    Raises:
      ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fitting = [one for one in candidates if one.fits]
    question = candidates[0].question
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), sharey=True, layout="constrained")
    for axis, (x, line) in zip(axes, (("pipe", "data"), ("pipe", "tensor"), ("tensor", "data")), strict=True):
        groups = best_by(fitting, lambda one: (getattr(one.run.parallel, line), getattr(one.run.parallel, x)))  # noqa: B023
        for value in sorted({key[0] for key in groups}):
            points = sorted((key[1], one.teraflops) for key, one in groups.items() if key[0] == value)
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{line} {value}")
        axis.set_xscale("log", base=2)
        axis.set_xlabel(f"{x} (the rest: {({'pipe', 'data', 'tensor'} - {x, line}).pop()})")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncols=2)
    axes[0].set_ylabel("predicted model TFLOP/s per GPU")
    figure.suptitle(
        f"{question.model.name} on {question.gpus} {question.card.name}, global batch {question.global_batch}: "
        "the fastest layout of each shape"
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot = {path} cannot be written: {error}; type --plot with a .svg or .png path.") from error
    finally:
        pyplot.close(figure)
