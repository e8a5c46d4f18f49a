"""torch's AdamW with the hyperparameters of a run."""

from megajax.config import TrainConfig


def adamw(model, train: TrainConfig):
    """The optimizer of a torch model: biases and norms are not decayed. The learning rate is to be set before each step."""
    import torch

    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if p.ndim <= 1 or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(train.beta1, train.beta2), eps=train.epsilon)


def take_step(optimizer, model, loss, rate: float, clip_norm: float) -> None:
    """One update at this learning rate, after clipping the norm of the whole gradient."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
