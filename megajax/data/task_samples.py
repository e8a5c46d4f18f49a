"""The samples and batches of --task, on which a BERT is fine-tuned."""

from megajax.config import ConfigError, RunConfig, option
from megajax.config.tasks import TASKS
from megajax.data.classification import ClassificationSamples, read_labelled
from megajax.data.loader import RowLoader
from megajax.data.race import RaceSamples, read_race
from megajax.data.squad import read_squad
from megajax.data.squad_windows import SpanSamples, WindowSizes
from megajax.data.tokenizers import Tokenizer

__all__ = ["TaskSamples", "task_loader", "task_samples"]

TaskSamples = ClassificationSamples | RaceSamples | SpanSamples


def task_samples(run: RunConfig, files: tuple[str, ...], tokenizer: Tokenizer, seed: int | None) -> TaskSamples:
    """The samples of --task-data (with a seed) or --dev-data (without).

    Raises:
      ConfigError: see the classes of samples and the functions that read their files.
    """
    data, name = run.data, ", ".join(files)
    task, length = TASKS[data.task], run.model.sequence_length
    if task.output_heads == "spans":
        sizes = WindowSizes(length, data.doc_stride, data.max_query_length)
        return SpanSamples(read_squad(files, task.rules), tokenizer, sizes, seed, name)
    if task.output_heads == "multiple_choice":
        found = read_race(files, run.model.choices)
        return RaceSamples(found, tokenizer, length, data.max_query_length, seed, name)
    return ClassificationSamples(read_labelled(data.task, files), tokenizer, length, seed, name)


def task_loader(run: RunConfig, tokenizer: Tokenizer) -> RowLoader:
    """The training batches of --task-data.

    Raises:
      ConfigError: there is none, or the model does not have the task's head; see `task_samples`.
    """
    model, data = run.model, run.data
    if not data.task_data:
        raise ConfigError(
            f"output_heads = {model.output_heads} has nothing to train on: pass --task NAME --task-data FILE."
        )
    wanted = TASKS[data.task].model
    if any(getattr(model, name, None) != value for name, value in wanted.items()):
        words = " ".join(f"{option(name)} {value}" for name, value in wanted.items())
        raise ConfigError(
            f"--task {data.task} needs a BERT with its head: pass {words}, as experiments.finetune_bert does."
        )
    model.require_whole_questions(run.parallel.microbatch_size)
    samples = task_samples(run, data.task_data, tokenizer, run.train.seed)
    return RowLoader(samples, run.train.global_batch_size, run.microbatches, None, model.vocabulary)
