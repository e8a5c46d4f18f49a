"""Training is torch's: 40 steps of AdamW on six families and five layouts, against transformers in fp64 on one device.

pip install "megajax[judges]" && pytest -m slow tests/interop/test_parity.py

The models have eight layers and random weights. megajax computes in fp32, torch in fp64: the tolerance is fp32's rounding.
"""

import dataclasses
import functools
import pathlib

import numpy as np
import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig
from megajax.interop.hugging_face.config import read_config
from megajax.interop.hugging_face.read_model import initial_params
from megajax.runtime.mesh import make_mesh
from megajax.train.step import make_training
from tests.interop import make_bert_golden
from tests.interop.make_golden import LENGTH, VOCABULARY, configs, random_model
from tests.interop.torch_adamw import adamw, take_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
STEPS, SAMPLES = 40, 8
LAYOUTS = {
    "data 2, pipe 2, tensor 2, interleaved, ZeRO-1": dict(
        data=2, pipe=2, tensor=2, schedule="interleaved_1f1b", chunks=2, zero=1
    ),
    "zb_v, ZeRO-3": dict(data=2, pipe=2, schedule="zb_v", chunks=2, zero=3),
    "dualpipe_v, pipe 4": dict(pipe=4, schedule="dualpipe_v", chunks=2),
    "context 2": dict(context=2, pipe=2, schedule="eager_1f1b"),
    "uneven, pipe 3, zb_h1, full recompute": dict(pipe=3, schedule="zb_h1", recompute="full"),
}
FAMILIES = ("gpt2", "llama", "mistral", "qwen3", "mixtral", "bert")
BALANCE = 0.05  # of mixtral's experts
TRAIN = TrainConfig(
    global_batch_size=SAMPLES, steps=STEPS, learning_rate=1e-3, warmup_steps=5, precision="fp32", weight_decay=0.1
)


@functools.cache
def torch_model(family: str):
    """transformers' model with eight layers, fp32, every parameter random."""
    if family == "bert":
        return make_bert_golden.random_bert("Bert", num_hidden_layers=8)
    config = configs()[family]
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    setattr(config, layers, 8)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * 8
    return random_model(config)


@functools.cache
def batches(family: str) -> list[dict[str, np.ndarray]]:
    """Whole batches, [SAMPLES, LENGTH]: mixtral's and BERT's samples end with padding, a third of the weights are 0."""
    random = np.random.default_rng(5)
    found = []
    for step in range(STEPS):
        # Not 0, whose embedding gets no gradient from transformers' BERT, where it is the padding's.
        drawn = random.integers(1, VOCABULARY, (SAMPLES, LENGTH + 1), dtype=np.int32)
        batch = {"tokens": drawn[:, :-1], "labels": drawn[:, 1:]}
        batch["sample"] = (SAMPLES * step + np.arange(SAMPLES)).astype(np.uint32)
        padding = random.integers(0, LENGTH // 2, SAMPLES, dtype=np.int32)
        real = np.arange(LENGTH) < LENGTH - padding[:, None]
        batch["weights"] = (random.random((SAMPLES, LENGTH)) > 0.3).astype(np.float32)
        if family == "mixtral":
            batch["padding_mask"] = (~real).astype(np.int32)
            batch["weights"] *= real
        if family == "bert":
            batch["types"] = random.integers(0, 3, (SAMPLES, LENGTH), dtype=np.int32)
            batch |= {"padding": padding, "swapped": random.integers(0, 2, SAMPLES, dtype=np.int32)}
            batch["weights"] *= real
        found.append(batch)
    return found


def losses_of_batch(family: str, model, batch: dict[str, np.ndarray]):
    """The reported loss, a mean over the batch's weights, for BERT with the order of segments; and what is added to it in
    training: the balance of mixtral's experts, by sample.
    """
    of = {name: torch.from_numpy(np.asarray(array, np.int64)) for name, array in batch.items()}
    weights = torch.from_numpy(batch["weights"]).double()
    arguments = {"input_ids": of["tokens"]}
    if family == "bert":
        arguments |= {"token_type_ids": of["types"]}
        arguments["attention_mask"] = (torch.arange(LENGTH) < LENGTH - of["padding"][:, None]).long()
    if family == "mixtral":
        arguments |= {"attention_mask": 1 - of["padding_mask"], "output_router_logits": True}
    out = model(**arguments)
    logits = out.prediction_logits if family == "bert" else out.logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), of["labels"], reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    if family == "bert":
        loss = loss + torch.nn.functional.cross_entropy(out.seq_relationship_logits, of["swapped"])
    added = 0.0
    if family == "mixtral":
        balance = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
        experts, chosen = model.config.num_local_experts, model.config.num_experts_per_tok
        mask = arguments["attention_mask"]
        for layer in out.router_logits:
            rows = layer.reshape(SAMPLES, LENGTH, experts)
            parts = [balance((rows[n],), experts, chosen, mask[n : n + 1]) / chosen for n in range(SAMPLES)]
            added = added + BALANCE * sum(parts) / SAMPLES
    return loss, added


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine to the minimum; steps from 1."""
    peak, low, warmup = TRAIN.learning_rate, TRAIN.minimum_learning_rate, TRAIN.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    return low + (peak - low) * (1 + np.cos(np.pi * (step - warmup) / (STEPS - warmup))) / 2


@functools.cache
def losses_of_torch(family: str) -> list[float]:
    """AdamW in fp64."""
    source = torch_model(family)
    model = type(source)(source.config)
    model.load_state_dict(source.state_dict())
    model = model.double().eval()  # without dropout
    if family == "mixtral":
        model.set_experts_implementation("eager")  # transformers' grouped matmul has no fp64
    optimizer, losses = adamw(model, TRAIN), []
    for number, batch in enumerate(batches(family)):
        loss, added = losses_of_batch(family, model, batch)
        take_step(optimizer, model, loss + added, learning_rate(number + 1), TRAIN.clip_norm)
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory):
    """The directory of a family's model, as transformers writes it."""

    @functools.cache
    def written(family: str) -> pathlib.Path:
        directory = tmp_path_factory.mktemp(family)
        torch_model(family).save_pretrained(directory)
        return directory

    return written


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_40_steps_are_torchs(family, layout, directory_of):
    directory = directory_of(family)
    model = dataclasses.replace(read_config(directory)[1], sequence_length=LENGTH, dropout=0.0)
    if family == "mixtral":
        model = dataclasses.replace(model, balance_loss=BALANCE)
    run = RunConfig(model, ParallelConfig(microbatch_size=1, **LAYOUTS[layout]), TRAIN)
    run.validate()
    training = make_training(run, make_mesh(run.parallel))
    state = dataclasses.replace(training.init_state(), params=initial_params(str(directory), training))
    losses = []
    for batch in batches(family):
        rows = {name: array.reshape(run.microbatches, -1, *array.shape[1:]) for name, array in batch.items()}
        state, metrics = training.train_step(state, rows)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, losses_of_torch(family), rtol=1e-6)
