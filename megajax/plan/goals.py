"""Questions the other way round: what a budget buys, how many GPUs a deadline needs, which of several clusters to take.

Chinchilla's rule (2203.15556, table 3): a training run of C = 6 N D FLOPs is best spent on D = 20 N tokens of a model with N
parameters, so N = sqrt(C / 120).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from megajax.config import PRESETS, ConfigError, ModelConfig
from megajax.estimate import model_costs
from megajax.plan.best import best_layouts, fastest
from megajax.plan.cluster import Cluster
from megajax.plan.options import MOST_GPUS
from megajax.plan.report import remedy
from megajax.plan.search import Candidate, NoLayout, Question

TOKENS_PER_PARAMETER = 20
USUAL_MFU = 0.45  # to guess which models to search
MODELS_TRIED, COUNTS_TRIED = 4, 24
SCALING = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Purchase:
    """A layout of a model and the days that a budget trains it."""

    best: Candidate
    days: float

    @property
    def tokens(self) -> float:
        return self.days / self.best.days(1.0)

    @property
    def parameters(self) -> int:
        return model_costs(self.best.question.model).parameters

    @property
    def per_parameter(self) -> float:
        return self.tokens / self.parameters

    def describe(self) -> str:
        """A line of the answer."""
        return (
            f"{self.best.question.model.name:<18}{self.parameters / 1e9:>7.1f}B {self.tokens / 1e9:>9.1f}B tokens "
            f"{self.per_parameter:>8.1f} a parameter {self.best.utilisation:>6.1%} MFU"
        )


def tokens_for(question: Question, cluster: Cluster, money: float) -> tuple[Purchase, str]:
    """The tokens that a budget trains the question's model on, and a text that says so.

    Raises:
      ConfigError: the cluster has no price, or no layout fits.
    """
    days = _days(question, cluster, money)
    best = fastest(question)
    if best is None:
        raise ConfigError(
            f"no layout of {question.model.name} fits on {question.gpus} {question.gpu.name}: pass more --gpus, or another "
            "--model; without --budget the planner says what is missing."
        )
    found = Purchase(best, days)
    return found, (
        f"budget {money:,.0f} {cluster.currency}: {days:.1f} days of {question.gpus} GPUs train on\n"
        f"  {found.describe()}\n  Chinchilla's rule is {TOKENS_PER_PARAMETER} a parameter: "
        f"{TOKENS_PER_PARAMETER * found.parameters / 1e9:,.0f}B tokens"
    )


def best_model(question: Question, cluster: Cluster, money: float) -> tuple[Purchase, str]:
    """The preset that a budget trains on nearest to 20 tokens a parameter, and a text with those that were compared.

    The question's model is not used; `money` is in the cluster's currency.

    Raises:
      ConfigError: the cluster has no price, or none of the presets of about the right size fits.
    """
    days = _days(question, cluster, money)
    peak = 86400 * days * question.gpus * question.gpu.peak(question.precision)  # FLOPs at an MFU of 1
    optimum = lambda mfu: math.sqrt(mfu * peak / (6 * TOKENS_PER_PARAMETER))  # noqa: E731
    guess = optimum(USUAL_MFU)
    # Decoders without experts, each once.
    models = {one.name: one for one in PRESETS.values() if type(one) is ModelConfig and not one.experts}
    nearest = sorted(models.values(), key=lambda one: abs(math.log(model_costs(one).parameters / guess)))
    tried = (fastest(dataclasses.replace(question, model=model)) for model in nearest[:MODELS_TRIED])
    found = [Purchase(best, days) for best in tried if best is not None]
    if not found:
        raise ConfigError(
            f"by Chinchilla's rule the budget is for a model of {guess / 1e9:.1f}B parameters, and no preset of about this "
            f"size fits on {question.gpus} {question.gpu.name}: pass more --gpus, or --model NAME."
        )
    best = min(found, key=lambda one: abs(math.log(one.per_parameter / TOKENS_PER_PARAMETER)))
    size = optimum(best.best.utilisation)
    lines = [
        f"budget {money:,.0f} {cluster.currency}: {days:.1f} days of {question.gpus} {question.gpu.name};\n"
        f"by Chinchilla's rule {size / 1e9:.1f}B parameters on {TOKENS_PER_PARAMETER * size / 1e9:,.0f}B tokens. "
        "Presets of about this size:"
    ]
    ordered = sorted(found, key=lambda one: one.parameters)
    lines += [f"  {one.describe()}{'  <- nearest to the rule' if one is best else ''}" for one in ordered]
    return best, "\n".join(lines)


def _days(question: Question, cluster: Cluster, money: float) -> float:
    """How long a budget pays for the GPUs."""
    if not cluster.price:
        raise ConfigError(
            "budget needs the price of a GPU for an hour: pass --cluster FILE.toml with a line such as price = 2.5."
        )
    return money / cluster.price / question.gpus / 24


def gpus_for(question: Question, tokens: float, days: float, most: int | None) -> tuple[Candidate, str]:
    """The fewest GPUs, in whole hosts, that train on `tokens` in `days`; with a text that says which were tried.

    The question's number of GPUs is not used; `most` is the largest number to try.

    Raises:
      ConfigError: even the most are too slow, or no layout fits.
    """
    model, host = model_costs(question.model), question.gpu.host_size
    peak = question.gpu.peak(question.precision)
    least = 6 * model.parameters * tokens / (peak * 86400 * days)  # at 100% of the peak; attention's FLOPs come on top
    slower: Candidate | None = None
    limit = min(most or MOST_GPUS, question.global_batch * model.layers * host)
    counts = [count for count in _counts(host) if least <= count <= limit][:COUNTS_TRIED]
    if not counts:
        work = f"a global batch of {question.global_batch} has work for {limit:,} at most"
        limited = f"--gpus allows {limit:,}" if most == limit else work
        raise ConfigError(
            f"deadline = {days:g} days for {tokens / 1e9:,.0f}B tokens needs {math.ceil(least):,} GPUs or more, even at "
            f"their peak; {limited}: pass a longer --deadline, fewer --tokens, or a faster --gpu."
        )
    for count in counts:
        best = fastest(dataclasses.replace(question, gpus=count))
        if best is None:
            continue
        if best.days(tokens) <= days:
            text = f"deadline {days:g} days for {tokens / 1e9:,.0f}B tokens: {_took(best, tokens)}"
            return best, text + (f"; {_took(slower, tokens)}" if slower else "")
        slower = best
    reached = _took(slower, tokens) if slower else "no layout fits"
    raise ConfigError(
        f"deadline = {days:g} days is not met by any number of GPUs of up to {counts[-1]} ({reached}): pass a longer "
        "--deadline, fewer --tokens, a larger --global-batch-size, or a faster --gpu."
    )


def _took(one: Candidate, tokens: float) -> str:
    return f"{one.question.gpus} GPUs take {one.days(tokens):.1f}"


def _counts(host: int) -> Iterator[int]:
    """Whole hosts: every number of them up to 8, then steps of a quarter of a power of two."""
    yield from (host * hosts for hosts in range(1, 9))
    size = 8
    while host * size <= MOST_GPUS:
        yield from (host * (size + size * quarter // 4) for quarter in range(1, 5))
        size *= 2


def scaling(question: Question, cluster: Cluster, tokens: float, counts: Sequence[int]) -> tuple[str, bool]:
    """A row for each number of GPUs with its best layout, time and cost; and whether anything fits on any.

    The global batch is the same for all. `counts`: none: SCALING.
    """
    lines = [
        f"{question.model.name} on {cluster.gpu.name}, global batch {question.global_batch}, {tokens / 1e9:.0f}B tokens; "
        "predicted:",
        f"{'GPUs':>6}{'t':>4}{'p':>4}{'d':>6}{'c':>4}{'zero':>6}{'step s':>9}{'tokens/s':>13}{'MFU':>7}{'days':>8}"
        f"{'GPU hours':>12}{'MWh':>9}{'money':>15}",
    ]
    fits = False
    for count in counts or SCALING:
        best = fastest(dataclasses.replace(question, gpus=count))
        if best is None:
            lines.append(f"{count:>6}  no layout is legal and fits")
            continue
        fits, parallel, cost = True, best.run.parallel, cluster.cost(count, best.days(tokens))
        money = "" if cost.money is None else f"{cost.money:,.0f} {cluster.currency}"
        lines.append(
            f"{count:>6}{parallel.tensor:>4}{parallel.pipe:>4}{parallel.data:>6}{parallel.context:>4}{parallel.zero:>6}"
            f"{best.time.total:>9.2f}{best.tokens_per_second:>13,.0f}{best.utilisation:>7.1%}{best.days(tokens):>8.1f}"
            f"{cost.gpu_hours:>12,.0f}{cost.megawatt_hours:>9,.1f}{money:>15}"
        )
    return "\n".join(line.rstrip() for line in lines), fits


def compare(question: Question, clusters: Sequence[Cluster], tokens: float) -> tuple[str, bool]:
    """A row for each cluster with its best layout, time and cost, or what to pass; and whether anything fits in any.

    Raises:
      ConfigError: a cluster's file has no number of GPUs, and none was passed (the question's is 0).
      NoLayout: no cluster has a legal layout.
    """
    lines = [
        f"{question.model.name}, global batch {question.global_batch}, {tokens / 1e9:.0f}B tokens; predicted:",
        f"{'cluster':<14}{'GPU':<12}{'GPUs':>6}{'t':>4}{'p':>4}{'d':>5}  {'schedule':<17}"
        f"{'step s':>8}{'TFLOP/s':>9}{'MFU':>7}{'days':>7}{'MWh':>8}{'money':>13}",
    ]
    fits, refused = False, []
    for cluster in clusters:
        gpus = cluster.gpus or question.gpus
        if not gpus:
            raise ConfigError(
                f"cluster {cluster.name} has no number of GPUs: write gpus = COUNT in its file, or pass --gpus."
            )
        head = f"{cluster.name[:13]:<14}{cluster.gpu.name:<12}{gpus:>6}"
        try:
            candidates = best_layouts(dataclasses.replace(question, gpu=cluster.gpu, gpus=gpus)).candidates
        except NoLayout as error:
            refused.append(error)
            lines.append(f"{head}  no layout takes a global batch of {question.global_batch}")
            continue
        if not candidates[0].fits:
            lines.append(f"{head}  nothing fits: {remedy(candidates[0])}")
            continue
        fits, best = True, candidates[0]
        parallel, cost = best.run.parallel, cluster.cost(gpus, best.days(tokens))
        money = "" if cost.money is None else f"{cost.money:,.0f} {cluster.currency}"
        lines.append(
            f"{head}{parallel.tensor:>4}{parallel.pipe:>4}{parallel.data:>5}  {parallel.schedule:<17}{best.time.total:>8.2f}"
            f"{best.teraflops:>9.0f}{best.utilisation:>7.1%}{best.days(tokens):>7.1f}{cost.megawatt_hours:>8,.1f}{money:>13}"
        )
    if len(refused) == len(clusters):
        raise refused[0]
    return "\n".join(lines), fits
