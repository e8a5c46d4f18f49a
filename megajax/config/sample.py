"""The text that a run generates after its training."""

from dataclasses import dataclass

from megajax.config.fields import check_fields, setting


@dataclass(frozen=True)
class SampleConfig:
    """A prompt, and how it is continued."""

    prompt: str = setting("The ", "text to continue", metavar="TEXT", may_be_empty=True)
    new_tokens: int = setting(0, "tokens to generate; 0: no text", low=0)
    temperature: float = setting(0.8, "of the sampling; 0: greedy", low=0)
    top_k: int | None = setting(None, "sample from this many most likely tokens", shown_default="all")

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: for the first field that is illegal.
        """
        check_fields(self)
