"""Which task of megajax.evaluate scores the weights during a training, and how often."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError, option
from megajax.config.fields import check_fields, setting

TASKS = ("wikitext103", "ptb", "lambada")
STRIDE = 32
BATCH = 8


@dataclass(frozen=True)
class EvaluateConfig:
    """A task, its file and its sizes, and the steps after which it runs. Names are those of megajax.evaluate."""

    evaluate_every: int | None = setting(
        None,
        "steps between two evaluations of --evaluate-task; there is always one after the last step",
        shown_default="none",
    )
    evaluate_task: str | None = setting(None, "task of megajax.evaluate", TASKS, shown_default="none")
    evaluate_data: str | None = setting(None, "the task's file", metavar="FILE", text_kind="path", shown_default="none")
    evaluate_window: int | None = setting(
        None, "tokens of a window of the perplexity tasks", shown_default="the model's context"
    )
    evaluate_stride: int | None = setting(None, "tokens from a window to the next", shown_default=str(STRIDE))
    evaluate_batch: int = setting(BATCH, "most samples that a replica runs at once")

    def validate(self) -> None:
        """Checks the values; no file is opened.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        check_fields(self)
        needed = ("evaluate_every", "evaluate_task", "evaluate_data")
        given = [name for name in needed if getattr(self, name) is not None]
        sizes = [name for name in ("evaluate_window", "evaluate_stride") if getattr(self, name) is not None]
        if (given or sizes) and len(given) < len(needed):
            missing = " and ".join(option(name) for name in needed if name not in given)
            raise ConfigError(f"{option((given or sizes)[0])} needs {missing} too: pass {missing}, or omit it.")
        if self.evaluate_task == "lambada" and sizes:
            raise ConfigError(
                f"{option(sizes[0])} is of overlapping windows, which --evaluate-task lambada has not: omit it."
            )
