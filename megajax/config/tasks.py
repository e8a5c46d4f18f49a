"""GLUE's classification tasks (1804.07461) that BERT is fine-tuned on: columns of their files, labels, and metrics."""

from dataclasses import dataclass

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """A task of `experiments.finetune_bert`.

    Attributes:
      columns: the sentences' columns and the label's, in Hugging Face's JSON lines; then those of GLUE's TSV.
      labels: names of the classes; a file has a name, or its number here.
      f1: whether it is scored by F1 of class 1 too.
    """

    columns: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    f1: bool = False


TASKS = {
    "mnli": Task(
        (("premise", "hypothesis", "label"), ("sentence1", "sentence2", "gold_label")),
        ("entailment", "neutral", "contradiction"),
    ),
    "qqp": Task(
        (("question1", "question2", "label"), ("question1", "question2", "is_duplicate")),
        ("not_duplicate", "duplicate"),
        f1=True,
    ),
    "sst2": Task((("sentence", "label"),), ("negative", "positive")),
    "mrpc": Task(
        (("sentence1", "sentence2", "label"), ("#1 String", "#2 String", "Quality")),
        ("not_equivalent", "equivalent"),
        f1=True,
    ),
    "rte": Task((("sentence1", "sentence2", "label"),), ("entailment", "not_entailment")),
}
