"""BERT's shape: a transformer whose tokens attend to all of their sample, with token types and BERT's two heads."""

from dataclasses import dataclass
from typing import ClassVar

from megajax.config.errors import ConfigError, multiples, one_of
from megajax.config.fields import setting
from megajax.config.model import ModelConfig

HEADS = ("masked_lm_and_order", "masked_lm", "classification", "multiple_choice", "spans", "none")


@dataclass(frozen=True, kw_only=True)
class BertConfig(ModelConfig):
    """The shape of a BERT (1810.04805), or of a ModernBERT (2412.13663): the fields of `ModelConfig`, and its own."""

    causal: ClassVar[bool] = False

    token_types: int = setting(
        2, "kinds of tokens (BERT: the two segments of a sample), each with a learned vector; 0: they have none", low=0
    )
    post_norm: bool = setting(
        False,
        "norms after the residual additions, as in 1810.04805; off: before attention and MLP (1909.08053 figure 7b)",
    )
    first_attention_norm: bool = setting(True, "off: the first layer's attention reads the embedding as it is")
    masked_lm_bias: bool | None = setting(None, "the logits of masked words add a bias", shown_default="as biases")
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
    def has_masked_lm_bias(self) -> bool:
        """Whether that head's logits add a bias."""
        return self.has_masked_lm and (self.biases if self.masked_lm_bias is None else self.masked_lm_bias)

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
        heads = self.has_masked_lm * (square + self.norm_parameters) + self.has_pooler * square
        heads += self.has_masked_lm_bias * self.vocabulary
        scores = 2 * self.has_order + self.scores * self.has_classifier + 2 * self.has_spans
        heads += scores * (self.hidden + bias)
        heads -= (not self.first_attention_norm) * self.norm_parameters  # which nothing reads and nothing trains
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
        if self.post_norm and self.embedding_norm:
            raise ConfigError("embedding_norm = True: post_norm norms the embedding already: pass --no-embedding-norm.")
        if not self.first_attention_norm and (self.post_norm or self.norm_placement == "post"):
            raise ConfigError(
                "first_attention_norm = False needs norms of attention's input: pass --first-attention-norm."
            )
        if self.chunked_attention is not None:
            raise ConfigError(
                f"chunked_attention = {self.chunked_attention} is not BERT's: pass --chunked-attention none."
            )
