"""Options of training on preferences (`experiments.dpo`); names and meaning are TRL's."""

from dataclasses import dataclass

from megajax.config.fields import check_fields, setting

__all__ = ["PreferenceConfig"]


@dataclass(frozen=True)
class PreferenceConfig:
    """The loss of pairs of a chosen and a rejected completion."""

    pairs: tuple[str, ...] = setting(
        (), "files of JSON lines with prompt, chosen and rejected", metavar="FILE", list_style="words"
    )
    chat_template: str | None = setting(
        None, "Jinja template of chats", metavar="FILE", text_kind="path", shown_default="the tokenizer's"
    )
    loss_type: str = setting(
        "sigmoid", "DPO (2305.18290), IPO (2310.12036), or KTO (2402.01306)", ("sigmoid", "ipo", "kto")
    )
    beta: float = setting(0.1, "weight of the deviation from the reference; IPO's tau")
    desirable_weight: float = setting(1.0, "kto: weight of the losses of chosen completions", low=0)
    undesirable_weight: float = setting(1.0, "kto: weight of the losses of rejected completions", low=0)

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: for the first field that is illegal.
        """
        check_fields(self)
