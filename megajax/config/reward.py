"""Options of training on rewards (`experiments.grpo`); names, meaning and defaults are TRL's."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError
from megajax.config.fields import check_fields, setting

__all__ = ["RewardConfig"]


@dataclass(frozen=True)
class RewardConfig:
    """Rollouts, their rewards, and the objective."""

    prompts: tuple[str, ...] = setting(
        (), "files of JSON lines with prompt, a text or messages", metavar="FILE", list_style="words"
    )
    chat_template: str | None = setting(
        None, "Jinja template of chats", metavar="FILE", text_kind="path", shown_default="the tokenizer's"
    )
    reward: str | None = setting(
        None,
        "function of (prompts, completions, completion_ids, and the rows' other keys), lists of one length, that returns "
        "a number for each completion",
        metavar="MODULE:FUNCTION",
        text_kind="any",
    )
    num_generations: int = setting(8, "completions of each prompt, whose rewards are compared")
    max_completion_length: int = setting(512, "most tokens of a completion")
    temperature: float = setting(1.0, "of the draws, and of the probabilities that are trained")
    top_k: int | None = setting(None, "draw from this many most likely tokens", shown_default="all")
    top_p: float = setting(1.0, "draw from the fewest tokens whose probabilities add up to this")
    num_iterations: int = setting(1, "steps on the same completions")
    beta: float = setting(0.0, "weight of the KL divergence from the model of --init-from; 0: no reference", low=0)
    use_bias_correction_kl: bool = setting(
        True,
        "multiply the KL divergence by the ratio of new to old probabilities, for an unbiased gradient (2512.02556)",
    )
    epsilon: float = setting(0.2, "the ratio of new to old probabilities is clipped below 1 - epsilon")
    epsilon_high: float | None = setting(None, "and above 1 + epsilon_high", shown_default="epsilon")
    loss_type: str = setting(
        "dapo",
        "mean over the batch's tokens (dapo); over each completion's, then over completions (grpo); or sum over tokens per "
        "completion and max_completion_length (dr_grpo)",
        ("dapo", "grpo", "dr_grpo"),
    )
    scale_rewards: str = setting(
        "group",
        "advantages are divided by the rewards' deviation in their group, in the batch, or not",
        ("group", "batch", "none"),
    )

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: for the first field that is illegal.
        """
        check_fields(self)
        if self.num_generations < 2:
            raise ConfigError(
                "num_generations = 1 leaves nothing to compare a completion with: pass --num-generations 2 or more."
            )
        if self.top_p > 1:
            raise ConfigError(f"top_p = {self.top_p} must be above 0 and at most 1: pass --top-p with such a value.")
