"""The rules between a model's fields of experts, and their numbers of parameters; `megajax/models/moe.py` computes them."""

import math

from megajax.config.errors import ConfigError, divisors, either, multiples, one_of, option

__all__ = ["check_expert_parallel", "check_experts", "expert_parameters", "expert_tokens"]

ONLY_WITH_EXPERTS = ("shared_feedforward", "shared_gate", "expert_biases", "balance_loss", "router_z_loss")
ONLY_WITH_EXPERTS += ("balance_bias_rate", "expert_capacity")


def check_experts(model) -> None:
    """Checks the fields of experts of a `ModelConfig` whose fields are legal each by itself.

    Raises:
        ConfigError: for the first rule that is broken.
    """
    if not model.experts:
        for name in ONLY_WITH_EXPERTS:
            if value := getattr(model, name):
                off = f"--no-{option(name)[2:]}" if value is True else f"{option(name)} 0"
                raise ConfigError(f"{name} = {value} does nothing without experts: pass {off}, or --experts 2 or more.")
        return
    if model.shared_gate and not model.shared_feedforward:
        raise ConfigError(
            "shared_gate = True multiplies a shared expert, and there is none: pass --shared-feedforward SIZE."
        )
    if model.experts == 1:
        raise ConfigError("experts = 1 leaves a router no choice: pass --experts 0 for a dense MLP, or 2 or more.")
    if not model.causal:
        raise ConfigError(
            f"experts = {model.experts} is supported by models whose tokens attend to earlier ones only, not by BERT: pass "
            "--experts 0."
        )
    if model.experts_per_token > model.experts:
        raise ConfigError(
            f"experts_per_token = {model.experts_per_token} is above experts = {model.experts}: pass "
            f"--experts-per-token {model.experts} or fewer."
        )
    if model.router_scores == "sigmoid" and model.router_softmax == "after":
        raise ConfigError(
            "router_softmax = after is of softmax scores, and router_scores = sigmoid: pass --router-softmax before."
        )
    if model.expert_weighted == "input" and model.expert_biases:
        raise ConfigError(
            "expert_weighted = input is of experts without biases, and expert_biases = True: pass --expert-weighted result."
        )
    size, choices = model.experts // model.router_groups, model.router_group_choices
    if model.experts % model.router_groups or (model.router_groups > 1 and size < 2):
        legal = [count for count in divisors(model.experts) if count == 1 or model.experts // count > 1]
        raise ConfigError(
            f"experts = {model.experts} cannot be cut into router_groups = {model.router_groups} of two or more: pass "
            f"{one_of('router_groups', legal, model.router_groups)}."
        )
    if model.router_groups > 1 and model.router_group_best > size:
        raise ConfigError(
            f"router_group_best = {model.router_group_best} is above the {size} experts of a group: pass "
            f"--router-group-best {size} or fewer."
        )
    if choices > model.router_groups or choices * size < model.experts_per_token:
        raise ConfigError(
            f"router_group_choices = {choices} of {model.router_groups} groups of {size} experts must have the "
            f"{model.experts_per_token} of a token: pass --router-group-choices {model.router_groups}."
        )


def check_expert_parallel(model, parallel) -> None:
    """Checks that the replicas of a group (`--expert`) can have equal numbers of the model's experts, and whole samples.

    Raises:
        ConfigError: they cannot.
    """
    degree = parallel.expert
    if model.expert_capacity and parallel.context > 1:
        raise ConfigError(
            f"expert_capacity = {model.expert_capacity} counts the choices of a sample, which context = {parallel.context} "
            "splits: pass --context 1 or --expert-capacity 0."
        )
    if degree > 1 and not model.experts:
        raise ConfigError(f"expert = {degree} splits experts, but {model.name} has none: pass --expert 1.")
    if degree > 1 and model.experts % degree:
        over, members = (parallel.tensor, "tensor ranks") if parallel.experts_over_tensor else (1, "replicas")
        legal = one_of("expert", [n for n in divisors(model.experts) if n % over == 0], degree)
        raise ConfigError(
            f"experts = {model.experts} cannot be split over expert = {degree} {members}: pass "
            f"{either(legal, one_of('experts', multiples(degree, model.experts), model.experts))}."
        )


def expert_tokens(model, tokens: int) -> int:
    """The most of a sample's `tokens` that one expert takes in training: all, or those of `expert_capacity`."""
    if not model.expert_capacity:
        return tokens
    return min(tokens, math.ceil(model.expert_capacity * model.experts_per_token * tokens / model.experts))


def expert_parameters(model, experts: int | None = None) -> int:
    """Trainable parameters of the MLP of a block with experts: the router's, the shared MLP's and the experts'.

    Experts and router add biases with `expert_biases` only. The router's balancing biases, which no gradient trains, are not
    counted.

    Args:
        model: the `ModelConfig`.
        experts: how many experts to count; all if not given. `experts_per_token` gives those that a token passes.
    """
    bias, into = int(model.biases), 2 if model.is_gated else 1
    own = int(model.expert_biases)
    one = (into + 1) * model.hidden * model.feedforward_size + own * (into * model.feedforward_size + model.hidden)
    shared = (model.hidden + bias) * into * model.shared_feedforward + (model.shared_feedforward + bias) * model.hidden
    shared += model.hidden * int(model.shared_gate)
    count = model.experts if experts is None else experts
    router = (model.hidden + own) * model.experts
    return router + count * one + (shared if model.shared_feedforward else 0)
