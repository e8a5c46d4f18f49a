"""What the planner prints: the best layouts, where their memory and time go."""

from collections.abc import Sequence

from megajax.plan.search import Candidate, Question, usable_bytes

# A letter of the memory bar for each part of `cost.memory.bytes_per_device`.
PARTS = {
    "weights": "w",
    "optimizer": "o",
    "gradients": "g",
    "16-bit weights": "h",
    "stash": "s",
    "copies": "c",
    "input to weight gradients": "k",
    "inboxes": "i",
    "workspace": "x",
}
LEGEND = (
    "memory: w weights, o optimizer, g gradients, h 16-bit weights, s stash, c copies, k kept for W, i inboxes, x work"
)
SHORT = {
    "interleaved_1f1b": "interleaved",
    "zb_1p_interleaved": "zb_1p",
    "eager_1f1b": "eager",
}


def memory_bar(memory: dict[str, int], limit: float, width: int = 32) -> str:
    """Bytes by part as letters, `width` of them being `limit`; "." is free, and what lies beyond the limit follows a |."""
    text, reached = "", 0.0
    for part, letter in PARTS.items():
        reached += memory.get(part, 0)
        text += letter * (round(reached / limit * width) - len(text))
    return text.ljust(width, ".") if len(text) <= width else f"{text[:width]}|{text[width:][:width]}"


def table(candidates: Sequence[Candidate], tokens: float) -> str:
    """The candidates as rows; all of them must have been timed."""
    head = (
        f"{'':>3} {'t':>3} {'p':>3} {'d':>4} {'v':>2} {'b':>2} {'m':>4}  {'schedule':<12}{'recompute':<10}{'zero':>4}"
        f"{'step s':>9}{'TFLOP/s':>8}{'MFU':>7}{'days':>7}{'bubble':>8}{'comm':>6}{'GB':>7}  memory"
    )
    return "\n".join([head, *(_row(index + 1, one, tokens) for index, one in enumerate(candidates))])


def _row(number: int, one: Candidate, tokens: float) -> str:
    parallel, time = one.run.parallel, one.time
    bar = memory_bar(one.memory, usable_bytes(one.question.card))
    return (
        f"{number:>2}. {parallel.tensor:>3} {parallel.pipe:>3} {parallel.data:>4} {parallel.chunks:>2} "
        f"{parallel.microbatch_size:>2} {one.run.microbatches:>4}  "
        f"{SHORT.get(parallel.schedule, parallel.schedule):<12}{parallel.recompute:<10}{parallel.zero:>4}"
        f"{time.total:>9.2f}{one.teraflops:>8.0f}{one.utilisation:>7.1%}{one.days(tokens):>7.1f}"
        f"{time.bubble / time.total:>8.1%}{time.communication / time.total:>6.0%}{one.peak / 1e9:>7.1f}  {bar}"
    )


def heading(question: Question, tokens: float, counted: int, fitting: int, seconds: float) -> str:
    """What was asked, and how much was looked at."""
    model, card = question.model, question.card
    return (
        f"{model.name}: {model.parameters / 1e9:.1f}B parameters on {question.gpus} {card.name} "
        f"({usable_bytes(card) / 1e9:.0f} of {card.memory / 1e9:.0f} GB usable), global batch {question.global_batch}, "
        f"{question.precision}, attention {question.settled_attention}, {tokens / 1e9:.0f}B tokens\n"
        f"{counted} legal layouts, {fitting} fit; {seconds:.1f} s. Times are of {question.software.name}'s program, "
        f"predicted; each mesh with its fastest schedule:"
    )


def smallest(candidates: Sequence[Candidate], count: int = 3) -> str:
    """What to say where nothing fits: the layouts that come nearest."""
    lines = ["nothing fits; the smallest:"]
    for one in candidates[:count]:
        parallel = one.run.parallel
        limit = usable_bytes(one.question.card)
        lines.append(
            f"  tensor {parallel.tensor} pipe {parallel.pipe} data {parallel.data}, {parallel.schedule}, recompute "
            f"{parallel.recompute}: {one.peak / 1e9:.1f} GB of {limit / 1e9:.1f}  {memory_bar(one.memory, limit)}"
        )
    return "\n".join(lines)
