"""Loads tasks of lm-evaluation-harness, built-in or of the user's own YAML files, and runs them with a `HarnessModel`."""

from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from megajax.config import ConfigError, near
from megajax.schedules.errors import one_line

__all__ = ["LoadedTasks", "load_tasks", "run_tasks"]


class LoadedTasks:
    """Tasks that exist and whose data can be read.

    Attributes:
      names: as on the command line.
      manager: that has loaded them.
    """

    def __init__(self, names: Sequence[str], manager: TaskManager):
        self.names, self.manager = list(names), manager


def load_tasks(names: Sequence[str], include_path: str | None) -> LoadedTasks:
    """Finds the tasks and reads their data, before any device is started.

    Raises:
      ConfigError: there is no such task, or its YAML file or its data cannot be read.
    """
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            where = (
                f"{include_path} and lm-eval {lm_eval.__version__}"
                if include_path
                else f"lm-eval {lm_eval.__version__}"
            )
            raise ConfigError(f"there is no task {name} in {where}: {_near(name, manager.all_tasks)}")
        try:
            manager.load([name])
        except Exception as error:  # whatever lm-eval and datasets make of a file
            reason = one_line(str(error) or type(error).__name__)
            raise ConfigError(
                f"the task {name} cannot be loaded ({reason[:300]}): correct its YAML file and its data; data that are not "
                "local have to be downloaded before."
            ) from None
    return LoadedTasks(names, manager)


def _near(name: str, names: Sequence[str]) -> str:
    found = near(name, names)
    return found if len(found) < 300 else "pass --include-path DIR for tasks of your own."


def run_tasks(
    model: Any, tasks: LoadedTasks, num_fewshot: int | None, limit: int | None, chat: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the tasks.

    Args:
      model: a `HarnessModel`.
      tasks: of `load_tasks`.
      num_fewshot: examples before each document; None: as each task says.
      limit: most documents of each task; None: all.
      chat: `simple_evaluate`'s apply_chat_template, fewshot_as_multiturn and system_instruction, those that are given.

    Returns:
      The results: by task its metrics, versions and numbers of documents; and the settings they depend on.
    """
    found = simple_evaluate(
        model=model,
        tasks=tasks.names,
        task_manager=tasks.manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
        **chat,
    )
    assert found is not None  # None on other processes than the first
    names = list(found["results"])
    results = {
        "tasks": {name: _numbers(found["results"][name]) for name in names},
        "documents": {name: count["effective"] for name, count in found["n-samples"].items()},
        "versions": {name: found["versions"].get(name) for name in names},
    }
    settings = {"num_fewshot": {name: found["n-shot"].get(name) for name in names}, "limit": limit, **chat}
    return results, settings | {"lm_eval": lm_eval.__version__}


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics, "name,filter" as lm-eval calls them; those without a value, such as a stderr, are left out."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "sample_len"}
