"""The rules between a model's rotary fields; `megajax/models/rotary.py` computes the frequencies from them."""

import re

from megajax.config.errors import ConfigError, divisors, either, one_of


def check_rotary(model) -> None:
    """Checks the rotary fields of a `ModelConfig` whose fields are legal each by itself.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    if model.rotary_scaling != "none" and model.positions != "rotary":
        raise ConfigError(
            f"rotary_scaling = {model.rotary_scaling} scales rotary frequencies, and positions = {model.positions}: pass "
            "--positions rotary or --rotary-scaling none."
        )
    if model.rotated_norm and model.positions != "rotary":
        raise ConfigError(
            f"rotated_norm = True is of queries and keys that rotate, and positions = {model.positions}: pass --positions "
            "rotary or --no-rotated-norm."
        )
    if model.rotary_fraction > 1:
        raise ConfigError(f"rotary_fraction = {model.rotary_fraction} is above 1: pass --rotary-fraction 1.")
    if model.positions == "rotary" and (model.rotated_dimension % 2 or not model.rotated_dimension):
        _refuse_odd(model)
    factors, needed = model.rotary_factors, model.rotated_dimension * (model.rotary_scaling == "longrope")
    if len(factors) != needed or not all(re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", one) and float(one) for one in factors):
        raise ConfigError(
            f"rotary_scaling = {model.rotary_scaling} needs {needed} rotary_factors above 0, and these are {len(factors)}:"
            f" {', '.join(factors) or 'none'}. With longrope pass two for each pair, of short samples first; else none."
        )
    if model.rotary_scaling == "none":
        if model.rotary_factor is not None:
            raise ConfigError(
                f"rotary_factor = {model.rotary_factor} does nothing without a scaling: pass --rotary-scaling llama3, "
                "linear or yarn, or --rotary-factor none."
            )
        return
    if model.rotary_factor is None or model.rotary_factor < 1:
        raise ConfigError(
            f"rotary_scaling = {model.rotary_scaling} needs a rotary_factor of 1 or more, and it is "
            f"{'not given' if model.rotary_factor is None else model.rotary_factor}: pass --rotary-factor 8."
        )
    if model.rotary_low_frequency > model.rotary_high_frequency:
        raise ConfigError(
            f"rotary_low_frequency = {model.rotary_low_frequency} must not be above rotary_high_frequency = "
            f"{model.rotary_high_frequency}: pass --rotary-low-frequency 1 --rotary-high-frequency 4."
        )
    if model.rotary_beta_slow > model.rotary_beta_fast:
        raise ConfigError(
            f"rotary_beta_slow = {model.rotary_beta_slow} must not be above rotary_beta_fast = {model.rotary_beta_fast}: "
            "pass --rotary-beta-slow 1 --rotary-beta-fast 32."
        )
    if model.rotary_scaling == "yarn" and model.rotary_base <= 1:
        raise ConfigError(f"rotary_base = {model.rotary_base} must be above 1 for yarn: pass --rotary-base 10000.")


def _refuse_odd(model) -> None:
    """Rotation needs pairs of elements."""
    if model.rotary_fraction < 1:
        raise ConfigError(
            f"positions = rotary rotates pairs of elements, but rotary_fraction = {model.rotary_fraction} of a head's "
            f"{model.head_dimension} elements are {model.rotated_dimension}: pass --rotary-fraction 1 or --rotary-fraction "
            f"{2 / model.head_dimension:g}."
        )
    if model.head_size is not None:
        raise ConfigError(
            f"positions = rotary rotates pairs of elements, but head_size = {model.head_size} is odd: pass --head-size "
            f"{model.head_size + 1}, or --positions learned."
        )
    even = [heads for heads in divisors(model.hidden) if model.hidden // heads % 2 == 0]
    raise ConfigError(
        f"positions = rotary rotates pairs of elements, but the head size hidden / heads = {model.hidden} / "
        f"{model.heads} = {model.head_dimension} is odd: pass "
        f"{either(one_of('heads', even, model.heads), '--positions learned')}."
    )
