"""How text is generated: what is continued, for how many tokens, and how each is drawn."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError
from megajax.config.fields import check_fields, setting


@dataclass(frozen=True)
class SampleConfig:
    """A prompt, and how it is continued."""

    prompt: str = setting("The ", "text to continue", metavar="TEXT", text_kind="any")
    new_tokens: int = setting(0, "tokens to generate; 0: no text", low=0)
    temperature: float = setting(0.8, "of the sampling; 0: greedy", low=0)
    top_k: int | None = setting(None, "sample from this many most likely tokens", shown_default="all")
    top_p: float = setting(1.0, "sample from the fewest tokens whose probabilities add up to this; 1: all")

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: for the first field that is illegal.
        """
        check_fields(self)
        if self.top_p > 1:
            raise ConfigError(f"top_p = {self.top_p} must be above 0 and at most 1: pass --top-p with such a value.")
