"""Tasks that BERT is fine-tuned on: GLUE's classes (1804.07461), SQuAD's spans (1606.05250), RACE's choices (1704.04683)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GLUE", "TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """A task of `experiments.finetune_bert`.

    Attributes:
      columns: the sentences' columns and the label's, in Hugging Face's JSON lines; then those of GLUE's TSV.
      labels: names of the classes; a file has a name, or its number here.
      f1: whether it is scored by F1 of class 1 too.
      output_heads: of the model, a value of `BertConfig.output_heads`.
      rules: of SQuAD's scores, "1.1" or "2.0".
      recipe: defaults of options, where they differ from the experiment's.
      epochs: default of --epochs.
      warmup: share of the steps in which the learning rate rises.
    """

    columns: tuple[tuple[str, ...], ...] = ()
    labels: tuple[str, ...] = ()
    f1: bool = False
    output_heads: str = "classification"
    rules: str = ""
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    epochs: int = 3
    warmup: float = 0.1

    @property
    def model(self) -> dict[str, Any]:
        """The fields of `BertConfig` that it needs; `classes` also where the model that is fine-tuned had others."""
        return {"output_heads": self.output_heads, "classes": max(2, len(self.labels))}

    @property
    def criterion(self) -> str:
        """The dev score by which the best checkpoint is chosen."""
        return "f1" if self.output_heads == "spans" else "accuracy"


GLUE = {
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
# 1810.04805 sections 4.2 and 4.3, and the sizes of run_squad.py.
SQUAD = {"sequence_length": 384, "learning_rate": 5e-5}
# Megatron-LM's example: 32 questions a step, each of four samples.
RACE = {
    "sequence_length": 512,
    "max_query_length": 128,
    "global_batch_size": 128,
    "learning_rate": 1e-5,
    "weight_decay": 0.1,
}
TASKS = GLUE | {
    "squad": Task(output_heads="spans", rules="1.1", recipe=SQUAD),
    "squad2": Task(output_heads="spans", rules="2.0", recipe=SQUAD | {"global_batch_size": 48}, epochs=2),
    "race": Task(output_heads="multiple_choice", recipe=RACE, warmup=0.06),
}
