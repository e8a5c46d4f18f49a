"""BERT's shape: a transformer whose tokens attend to all of their sample, with token types and BERT's two heads."""

from dataclasses import dataclass
from typing import ClassVar

from megajax.config.errors import ConfigError, multiples, one_of, option
from megajax.config.fields import setting
from megajax.config.model import ModelConfig

HEADS = ("masked_lm_and_order", "masked_lm", "classification", "multiple_choice", "spans", "none")


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """The shape of a BERT (1810.04805): the fields of `ModelConfig`, of which a sliding window is not legal, and its own."""

    causal: ClassVar[bool] = False

    token_types: int = setting(2, "kinds of tokens (BERT: the two segments of a sample), each with a learned vector")
    post_norm: bool = setting(
        False,
        "norms after the residual additions, as in 1810.04805; off: before attention and MLP (1909.08053 figure 7b)",
    )
    output_heads: str = setting(
        "masked_lm_and_order",
        "heads: masked words and the order of two segments; masked words only; classes of a sample; the right one of "
        "several samples; first and last token of an answer; none",
        HEADS,
    )
    classes: int = setting(2, "number of classes of --output-heads classification")
    choices: int = setting(4, "samples of a question, one for each answer, of --output-heads multiple_choice")

    @property
    def has_masked_lm(self) -> bool:
        """Whether it has the head that predicts masked words."""
        return self.output_heads in ("masked_lm_and_order", "masked_lm")

    @property
    def has_pooler(self) -> bool:
        """Whether it has a layer on the first token's output, as `transformers` decides it: not for tokens only."""
        return self.output_heads not in ("masked_lm", "spans")

    @property
    def has_order(self) -> bool:
        """Whether it has the head that predicts whether two segments are swapped."""
        return self.output_heads == "masked_lm_and_order"

    @property
    def has_classifier(self) -> bool:
        """Whether it has the head that scores the pooled first token: the classes of a sample, or the sample as a choice."""
        return self.output_heads == "classification" or self.has_choices

    @property
    def has_choices(self) -> bool:
        """Whether samples are compared: `choices` samples that follow one another are the answers to one question."""
        return self.output_heads == "multiple_choice"

    @property
    def scores(self) -> int:
        """Scores of a sample by the head of `has_classifier`."""
        return 1 if self.has_choices else self.classes

    @property
    def has_spans(self) -> bool:
        """Whether it has the head that scores each token as the first and as the last one of an answer."""
        return self.output_heads == "spans"

    @property
    def has_task(self) -> bool:
        """Whether its head is trained on the samples of a task (`megajax.config.tasks`)."""
        return self.has_classifier or self.has_spans

    def require_loss(self) -> None:
        """Raises ConfigError if it has no head with a loss."""
        if not (self.has_masked_lm or self.has_task):
            raise ConfigError("output_heads = none has no loss to train on: pass --output-heads masked_lm_and_order.")

    def require_whole_questions(self, rows: int) -> None:
        """Raises ConfigError if `rows`, the samples in a microbatch of a replica, are not all choices of their questions."""
        if self.has_choices and rows % self.choices:
            sizes = one_of("microbatch_size", multiples(self.choices, rows), rows)
            raise ConfigError(
                f"microbatch_size = {rows} is not a multiple of choices = {self.choices}, the samples of a question, which "
                f"are compared in one microbatch: pass {sizes}."
            )

    @property
    def parameters(self) -> int:
        """Exact number of trainable parameters, with the vocabulary unpadded.

        The norm that `ModelConfig.parameters` counts after the last block is after the embedding with `post_norm`.
        """
        bias = int(self.biases)
        square = (self.hidden + bias) * self.hidden
        masked_lm = square + self.norm_parameters + bias * self.vocabulary
        heads = self.has_masked_lm * masked_lm + self.has_pooler * square
        scores = 2 * self.has_order + self.scores * self.has_classifier + 2 * self.has_spans
        heads += scores * (self.hidden + bias)
        return super().parameters + self.token_types * self.hidden + heads

    def validate(self) -> None:
        """Checks the model's own shape.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        super().validate()
        if self.post_norm and self.norm_placement != "pre":
            raise ConfigError(
                f"norm_placement = {self.norm_placement} is not supported by BERT with post_norm: pass --norm-placement pre "
                "or --no-post-norm."
            )
        if self.embedding_norm:
            raise ConfigError("embedding_norm = True is not supported by BERT: pass --no-embedding-norm.")
        for name in ("sliding_window", "chunked_attention"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(
                    f"{name} = {value} is not supported by BERT, whose tokens attend to all others: pass "
                    f"{option(name)} none."
                )
