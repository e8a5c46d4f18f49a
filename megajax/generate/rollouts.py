"""Training on the model's own completions: they are drawn by the `Decoder`, rewarded by a function, and trained on."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.config import ConfigError
from megajax.config.reward import RewardConfig
from megajax.config.sample import SampleConfig
from megajax.data.preferences import completion_row
from megajax.data.reward_prompts import PromptBatches, RewardPrompt
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_rules, decoding_run
from megajax.generate.text import Ending, Sample, Speed, continue_prompts
from megajax.models.preference import PolicyModel
from megajax.ops.preference import group_advantages
from megajax.train.step import Training, TrainState

__all__ = ["RewardTraining"]

Tree = Any


class RewardTraining(Training):
    """`Training` of a `PolicyModel`."""

    data: PromptBatches
    settings: RewardConfig
    reward: Callable[..., Sequence[float]]
    read: Callable[[str, Training], Tree]  # the parameters of a directory
    decoder: Decoder
    takes_hold = False  # a step's completions are the last state's

    @classmethod
    def of(
        cls, training: Training, data: PromptBatches, settings: RewardConfig, reward: Callable, read: Callable
    ) -> "RewardTraining":
        """The training of a `Trainer`, with its prompts and the function of rewards."""
        run = training.run
        if run.parallel.context > 1 or jax.process_count() > 1:
            problem = "context ranks have parts of completions" if run.parallel.context > 1 else "one process draws all"
            raise ConfigError(f"rollouts are not supported with context or several processes: {problem}.")
        own = cls(training.program, training.mesh, training.model_class, training.rules)
        own.data, own.settings, own.reward, own.read = data, settings, reward, read
        own.decoder = Decoder(
            decoding_run(run),
            own.mesh,
            DecodeSizes(
                run.train.global_batch_size,
                max(len(one.tokens) for one in data.prompts),
                settings.max_completion_length,
            ),
            SampleConfig(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
            seed=run.train.seed,
            model=own.model_class,
            rules=decoding_rules(own.rules),
        )
        shardings = (own.params_sharding, own.batch_sharding)
        scores = jax.jit(own._scores, in_shardings=shardings, out_shardings=own.batch_sharding)
        own.scores = own.checked(scores)
        own._reference, own._rollout = None, (-1, {}, {})
        return own

    def refilled(self, state: TrainState, batch: Callable[[int], Tree], consumed_samples: int) -> TrainState:
        """The state as it is; reads the reference model, if there is one."""
        if self.settings.beta:
            assert self.run.train.init_from is not None  # `experiments.grpo` requires it
            self._reference = self.read(self.run.train.init_from, self)
        return state

    def train_step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, Any]]:
        """As `Training.train_step`, of completions that are drawn by the state first, or for the step before."""
        size = self.run.train.global_batch_size
        number = int(np.asarray(batch["sample"]).reshape(-1)[0]) // size // self.settings.num_iterations
        if self._rollout[0] != number:
            self._rollout = (number, *self.rollout(state.params, number * size + np.arange(size)))
        arrays, measured = self._rollout[1:]
        state, metrics = super().train_step(state, {**batch, **arrays})
        values = {name: jnp.float32(value) for name, value in measured.items()}
        return state, {**metrics, "model": {**values, **metrics["model"]}}

    def rollout(self, params: Tree, numbers: np.ndarray) -> tuple[Tree, dict[str, float]]:
        """The arrays of a batch, [microbatches, samples, ...], with completions of the prompts of these samples; metrics."""
        prompts = [self.data.of(int(number)) for number in numbers]
        completions, ended = self.draw(params, prompts, numbers)
        rewards = self.rewarded(prompts, completions)
        advantages = np.asarray(group_advantages(rewards, self.settings.num_generations, self.settings.scale_rewards))
        rows = [
            completion_row(prompt.tokens, completion, self.run.model.sequence_length)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        batch |= {"advantages": advantages.astype(np.float32), "sample": numbers.astype(np.uint32)}
        batch = {name: array.reshape(*self.data.shape, *array.shape[1:]) for name, array in batch.items()}
        batch = {name: jax.device_put(array, self.batch_sharding) for name, array in batch.items()}
        with jax.set_mesh(self.mesh):
            by = {"old": params, "reference": self._reference}
            scored = {name: self.scores(by[name], batch) for name in self.model.scored}
        groups = rewards.reshape(-1, self.settings.num_generations)
        lengths = [len(one) for one in completions]
        return batch | scored, {
            "reward": rewards.mean(),
            "reward_std": rewards.std(ddof=1),
            "frac_reward_zero_std": np.isclose(groups.std(1, ddof=1), 0).mean(),
            "completions/mean_length": np.mean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": 1 - np.mean(ended),
        }

    def draw(
        self, params: Tree, prompts: Sequence[RewardPrompt], numbers: np.ndarray
    ) -> tuple[list[np.ndarray], list[bool]]:
        """A completion of each prompt, int32 [tokens] with the token that ends it, and whether it has one."""
        weights, tokenizer = self.decoder.weights(params, self.where), self.data.tokenizer
        end = tokenizer.end_of_document
        ending = Ending(self.settings.max_completion_length, self.run.model.sequence_length, tokens=frozenset({end}))
        samples = [
            Sample(int(number), prompt.tokens, ending, tokenizer)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        continue_prompts(self.decoder, weights, samples, Speed())
        ended = [sample.finish == "end" for sample in samples]
        drawn = [
            [*sample.tokens, end] if whole else sample.tokens for sample, whole in zip(samples, ended, strict=True)
        ]
        return [np.array(tokens, np.int32) for tokens in drawn], ended

    def rewarded(self, prompts: Sequence[RewardPrompt], completions: Sequence[np.ndarray]) -> np.ndarray:
        """The rewards of completions, fp32 [n]; the function is given lists of one length, as TRL's are.

        Raises:
          ConfigError: it does not return a finite number for each.
        """
        tokenizer = self.data.tokenizer
        end = tokenizer.end_of_document
        plain = [ids[:-1] if ids[-1] == end else ids for ids in completions]
        texts = [tokenizer.text(ids.tolist()) for ids in plain]
        said = [
            [{"role": "assistant", "content": text}] if isinstance(one.prompt, list) else text
            for one, text in zip(prompts, texts, strict=True)
        ]
        names = dict.fromkeys(name for one in prompts for name in one.columns)
        columns = {name: [one.columns.get(name) for one in prompts] for name in names}
        ids = [one.tolist() for one in completions]
        found = self.reward(prompts=[one.prompt for one in prompts], completions=said, completion_ids=ids, **columns)
        name = self.settings.reward
        if len(found) != len(prompts) or any(one is None or not math.isfinite(one) for one in found):
            raise ConfigError(
                f"{name} returned {len(found)} values for {len(prompts)} completions, or one that is no finite number: "
                "return a number for each."
            )
        return np.array(found, np.float32)

    def _scores(self, params: Tree, batch: Tree) -> jax.Array:
        """Traced: the labels' log-probabilities, fp32 [microbatches, samples, s]."""
        model, functions = self.evaluation()
        assert isinstance(model, PolicyModel)

        def collect(shared: Tree, y: jax.Array, microbatch: Tree) -> jax.Array:
            return model.log_probabilities(shared, y, microbatch["labels"], self.settings.temperature)[0]

        return self.forward(functions, collect, params, batch)
