r"""Exact match and F1 of predicted answers to SQuAD's questions, as the official scripts of versions 1.1 and 2.0 count them.

python -m megajax.evaluate.squad --task-data dev-v2.0.json --predictions predictions.json --no-answer null_odds.json \
    --threshold 0.5 --out squad.json

--predictions is {"question's id": "answer", ...}, where "" says that a question has no answer; --no-answer is {"question's
id": number, ...}, a probability or score that it has none.

Answers are compared without case, punctuation, articles and repeated spaces. A question's score is the highest over its
answers. The rules of the versions differ:

                                1.1                     2.0
    question without answers    refused                 right if the prediction is ""
    answers such as "the"       kept                    ignored, as if they were not there
    F1 of two empty answers     0                       1
    question not predicted      scores 0, is counted    refused: the official script ends with a KeyError
"""

import argparse
import collections
import dataclasses
import json
import math
import re
import string
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megajax.config import ConfigError
from megajax.config.options import Parser
from megajax.data.json_values import read_json, value_of
from megajax.data.squad import questions_in
from megajax.evaluate.results import describe_numbers
from megajax.interop.output_file import OutputFile
from megajax.schedules.arguments import FLOAT32, number
from megajax.schedules.errors import exit_code, shown
from megajax.schedules.paths import local_path

__all__ = ["RULES", "Questions", "exact_match", "f1", "main", "normalize", "read_questions", "score"]

RULES = ("1.1", "2.0")
FORMAT = "pass --task-data a file in SQuAD's format"
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(answer: str) -> str:
    """The text in lower case, then without ASCII punctuation, then without articles and repeated spaces.

    The order matters: "a.m." is "am", and "-a-" is an article.
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, predicted: str) -> float:
    """1.0 if the normalized texts are equal, else 0.0."""
    return float(normalize(answer) == normalize(predicted))


def f1(answer: str, predicted: str, rules: str) -> float:
    """The harmonic mean of the shares of words in common, with repetitions, of the two normalized texts.

    If one of them is empty, it is 0 by the rules 1.1; by 2.0 it is 1 if both are, else 0.
    """
    words, found = normalize(answer).split(), normalize(predicted).split()
    if not words or not found:
        return float(rules == "2.0" and words == found)
    common = (collections.Counter(words) & collections.Counter(found)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(words)
    return 2 * precision * recall / (precision + recall)


@dataclasses.dataclass(frozen=True)
class Questions:
    """The questions of a file.

    Attributes:
      rules: one of RULES.
      answers: texts of each question's answers, by its id; none if it has no answer.
    """

    rules: str
    answers: Mapping[str, Sequence[str]]


def read_questions(path: str, rules: str | None = None) -> Questions:
    """Reads a file in SQuAD's format.

    Args:
      path: JSON, {"version": ..., "data": [{"paragraphs": [{"qas": [{"id": ..., "answers": [{"text": ...}]}]}]}]}.
      rules: one of RULES; None: those of the file's version.

    Raises:
      ConfigError: the file cannot be read, is not as above, has no question, has one twice or, by the rules 1.1, has one
        without an answer; or there are no `rules`, and its version is not known.
    """
    content = read_json(path, "pass --task-data a JSON file")
    if rules is None:
        version = str(content.get("version")).removeprefix("v")
        rules = {"1": "1.1", "2": "2.0"}.get(version.partition(".")[0])
        if rules is None:
            raise ConfigError(
                f"{path} has version {shown(content.get('version'))}, not 1.1 or v2.0: pass --rules {' or '.join(RULES)}."
            )
    answers: dict[str, list[str]] = {}
    for place, _, question in questions_in(path, content, FORMAT):
        name = value_of(place, question, "id", str, FORMAT)
        items = enumerate(value_of(place, question, "answers", list, FORMAT))
        texts = [value_of(f"{place}, answers[{index}]", answer, "text", str, FORMAT) for index, answer in items]
        if name in answers:
            raise ConfigError(
                f"{place}: the id {shown(name)} occurs twice; pass --task-data a file with each question once."
            )
        if not texts and rules == "1.1":
            raise ConfigError(
                f"{place}: question {shown(name)} has no answer, which SQuAD 1.1 requires: pass --rules 2.0."
            )
        answers[name] = texts
    if not answers:
        raise ConfigError(f"{path} has no question: pass --task-data a file of SQuAD.")
    return Questions(rules, answers)


def score(
    questions: Questions,
    predictions: Mapping[str, str],
    no_answer: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """The metrics of the predictions, in percent of the questions.

    Args:
      questions: with their answers.
      predictions: a text for each question's id; "" for no answer. Other ids are counted as `unknown`.
      no_answer: a score for each question's id; above `threshold` the prediction becomes "". Rules 2.0 only.
      threshold: of `no_answer`.

    Returns:
      exact_match, f1, total (questions), not_predicted, unknown; by the rules 2.0 also answerable_... and
      unanswerable_exact_match, _f1 and _total, if there are such questions; with `no_answer` also best_exact_match and
      best_f1, the highest over all thresholds, and best_exact_match_threshold and best_f1_threshold.

    Raises:
      ConfigError: by the rules 2.0, a question has no prediction, or none of `no_answer`; or that is given by 1.1.
    """
    answers, rules = questions.answers, questions.rules
    missing = [name for name in answers if name not in predictions]
    if rules == "2.0":
        _require_all("--predictions", missing, answers)
        scored = answers if no_answer is None else no_answer
        _require_all("--no-answer", [name for name in answers if name not in scored], answers)
    elif no_answer is not None:
        raise ConfigError(
            "--no-answer is only legal by the rules 2.0, as each question of SQuAD 1.1 has an answer: omit it."
        )
    raw = {"exact_match": {}, "f1": {}}
    for name, texts in answers.items():
        kept = texts if rules == "1.1" else [text for text in texts if normalize(text)] or [""]
        predicted = predictions.get(name)
        raw["exact_match"][name] = max(exact_match(text, predicted) if predicted is not None else 0.0 for text in kept)
        raw["f1"][name] = max(f1(text, predicted, rules) if predicted is not None else 0.0 for text in kept)
    abstained = {name for name in answers if no_answer and no_answer[name] > threshold}
    final = {
        metric: {name: float(not answers[name]) if name in abstained else value for name, value in values.items()}
        for metric, values in raw.items()
    }
    counts = {"not_predicted": len(missing), "unknown": sum(name not in answers for name in predictions)}
    results = _means("", final, answers) | counts
    if rules == "2.0":
        results |= _means("answerable_", final, [name for name in answers if answers[name]])
        results |= _means("unanswerable_", final, [name for name in answers if not answers[name]])
    for metric, values in raw.items() if no_answer else ():
        best, at = _best_threshold(values, questions, predictions, no_answer)
        results |= {f"best_{metric}": best, f"best_{metric}_threshold": at}
    return results


def _means(prefix: str, scores: Mapping[str, Mapping[str, float]], names: Collection[str]) -> dict[str, float]:
    if not names:
        return {}
    means = {
        prefix + metric: 100 * sum(values[name] for name in names) / len(names) for metric, values in scores.items()
    }
    return {**means, prefix + "total": len(names)}


def _best_threshold(
    scores: Mapping[str, float], questions: Questions, predictions: Mapping[str, str], no_answer: Mapping[str, float]
) -> tuple[float, float]:
    """The highest mean score over the thresholds, in percent, and the lowest threshold that has it.

    As officially: questions become predicted one by one, in ascending order of `no_answer`, also those of one value; the
    start, with no question predicted, has the threshold 0.
    """
    answers = questions.answers
    current = best = float(sum(not texts for texts in answers.values()))
    threshold = 0.0
    for name in sorted((name for name in no_answer if name in answers), key=lambda name: no_answer[name]):
        current += scores[name] if answers[name] else -float(bool(predictions[name]))
        if current > best:
            best, threshold = current, no_answer[name]
    return 100 * best / len(answers), threshold


def _require_all(option: str, missing: Sequence[str], answers: Mapping[str, Any]) -> None:
    if missing:
        raise ConfigError(
            f"{option} lacks {len(missing):,} of the {len(answers):,} questions, the first {shown(missing[0])}: pass a file "
            "with every question's id."
        )


def _read_predictions(path: str) -> dict[str, str]:
    predictions = read_json(path, "pass --predictions a JSON file")
    for name, text in predictions.items():
        if not isinstance(text, str):
            raise ConfigError(
                f'{path}: the answer to {shown(name)} is {shown(text)}, not a text: write a text, "" for none.'
            )
    return predictions


def _read_no_answer(path: str) -> dict[str, float]:
    values = read_json(path, "pass --no-answer a JSON file")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{path}: the value of {shown(name)} is {shown(value)}, not a finite number: write a number."
            )
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the metrics as JSON, or writes them to --out; returns the exit code, 2 for a user's mistake."""
    formatting = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="python -m megajax.evaluate.squad", description=__doc__, formatter_class=formatting, allow_abbrev=False
    )
    parser.renamed = {"--data": "--task-data"}
    files = {"metavar": "FILE", "type": local_path}
    parser.add_argument("--task-data", required=True, help="questions and answers in SQuAD's format", **files)
    parser.add_argument("--predictions", required=True, help="JSON: an answer for each question's id", **files)
    parser.add_argument("--no-answer", help="JSON: a score for each question's id that it has no answer", **files)
    parser.add_argument(
        "--threshold",
        type=number(-FLOAT32),
        default=1.0,
        help="the prediction is no answer above this score (default: 1.0)",
    )
    parser.add_argument("--rules", choices=RULES, help="of this version (default: the version of --task-data)")
    parser.add_argument("--out", help="a JSON file for the metrics; without it they are printed", **files)
    return exit_code(lambda: _run(parser.parse_args(arguments)))


def _run(options: argparse.Namespace) -> None:
    questions = read_questions(options.task_data, options.rules)
    predictions = _read_predictions(options.predictions)
    no_answer = _read_no_answer(options.no_answer) if options.no_answer else None
    output = OutputFile(options.out) if options.out else None
    results = {"rules": questions.rules, **score(questions, predictions, no_answer, options.threshold)}
    text = json.dumps(results, indent=2)
    if output:
        output.write(text + "\n")
    print(f"SQuAD {questions.rules}: {describe_numbers(results)}" if output else text)


if __name__ == "__main__":
    sys.exit(main())
