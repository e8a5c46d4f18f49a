"""How text is generated: what is continued, for how many tokens, and how each is drawn."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError, option
from megajax.config.fields import check_fields, setting

__all__ = ["LogitsRules", "SampleConfig"]


@dataclass(frozen=True)
class SampleConfig:
    """A prompt, and how it is continued. The fields of the draws have the names and the meaning of transformers'."""

    prompt: str = setting("The ", "text to continue", metavar="TEXT", text_kind="any")
    new_tokens: int = setting(0, "tokens to generate; 0: no text", low=0)
    temperature: float = setting(0.8, "of the sampling; 0: greedy", low=0)
    top_k: int | None = setting(None, "sample from this many most likely tokens", shown_default="all")
    top_p: float = setting(1.0, "sample from the fewest tokens whose probabilities add up to this; 1: all")
    min_p: float = setting(0.0, "sample from tokens of at least this share of the highest probability; 0: all", low=0)
    repetition_penalty: float = setting(1.0, "divides the scores of tokens of the prompt and the text; 1: none")
    no_repeat_ngram_size: int = setting(0, "no sequence of so many tokens occurs twice; 0: any may", low=0)
    min_new_tokens: int = setting(0, "tokens that are generated before a text may end", low=0)

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: for the first field that is illegal.
        """
        check_fields(self)
        for name, low in (("top_p", "above 0"), ("min_p", "0 or more")):
            if (value := getattr(self, name)) > 1:
                raise ConfigError(
                    f"{name} = {value} must be {low} and at most 1: pass {option(name)} with such a value."
                )


@dataclass(frozen=True)
class LogitsRules:
    """What a model's own generation settings change in the scores of the next token, beside a `SampleConfig`.

    The names and the meaning are those of transformers' GenerationConfig. Tokens are ids.

    Attributes:
      ends: tokens that end a text, for the rules that concern them.
      min_length: tokens of prompt and text before an end.
      suppress_tokens, begin_suppress_tokens: that are never drawn, or not as the first new token.
      sequence_bias: (tokens, what is added to the score of the last one after the others).
      bad_words: such sequences that are never drawn.
      forced_bos: the token that follows a prompt of one token.
      forced_eos: the tokens of which the last of `new_tokens`, or of `max_length`, is one.
      max_length: most tokens of prompt and text; None: any.
      exponential_decay_length_penalty: (new tokens, factor) from which on ends become more likely.
      remove_invalid_values: whether NaN and infinite scores become finite.
      top_h, typical_p, epsilon_cutoff, eta_cutoff: of the sampling; None, 1, 0 and 0: all tokens.
    """

    ends: tuple[int, ...] = ()
    min_length: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    forced_bos: int | None = None
    forced_eos: tuple[int, ...] = ()
    max_length: int | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    def validate(self, vocabulary: int) -> None:
        """Checks that the tokens are in a vocabulary.

        Raises:
          ConfigError: one of them is not.
        """
        sequences = [*self.bad_words, *(tokens for tokens, _ in self.sequence_bias)]
        named = {
            "eos_token_id": self.ends if self.exponential_decay_length_penalty else (),
            "sequence_bias or bad_words_ids": tuple(token for tokens in sequences for token in tokens),
            "forced_bos_token_id": () if self.forced_bos is None else (self.forced_bos,),
            "forced_eos_token_id": self.forced_eos,
        }
        for name, tokens in named.items():
            if outside := [token for token in tokens if not 0 <= token < vocabulary]:
                raise ConfigError(
                    f"{name} of the model's generation settings has token {outside[0]}, but the model has tokens 0 to "
                    f"{vocabulary - 1}: correct the file, or pass --generation-config none."
                )
