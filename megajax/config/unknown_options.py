"""The message about options that a command does not have.

It names, in this order: the same option spelled with dashes, the option here for another tool's name
(`megajax.config.foreign`), the command that has the option, and the options that are spelled alike.
"""

import re
from collections.abc import Collection, Iterator, Sequence

from megajax.config.command_options import COMMAND_OPTIONS, TRAINING
from megajax.config.foreign import COMMON, OF_COMMANDS, TOOLS, Entry
from megajax.schedules.arguments import near_hint, near_options

OPTION = re.compile(r"--[a-z][a-z0-9-]*")
MOST = 5  # options that one message is about
MISSPELLED = 0.85  # likeness of a name that is taken for a misspelled one, and not for that of another command


def describe_unknown(words: Sequence[str], flags: Collection[str]) -> str:
    """The message about the words that belong to no option.

    Args:
      words: as `parse_known_args` returns them: options, and perhaps their values.
      flags: the command's options, "--global-batch-size".
    """
    given = [word.partition("=")[0] for word in words if word.startswith("-") and not is_number(word)]
    if not given:
        return f"{words[0]!r} is not an option: options start with --, as in --model NAME; --help lists them"
    return "; ".join(_describe(name, frozenset(flags)) for name in list(dict.fromkeys(given))[:MOST])


def is_number(word: str) -> bool:
    """Whether a word is a negative number, the value of an option."""
    return re.fullmatch(r"-[\d.]+(e-?\d+)?", word) is not None


def key_of(name: str) -> str:
    """A name as it is compared: "--per_device_train_batch_size" is per-device-train-batch-size."""
    return name.lstrip("-").replace("_", "-").lower()


def options_of(entry: Entry) -> list[str]:
    """The options here that an entry names; its remark may name more."""
    return OPTION.findall(entry[0])


def _describe(given: str, flags: frozenset[str]) -> str:
    missing, key = f"there is no option {given}", key_of(given)
    if f"--{key}" in flags:
        return f"{missing}: it is spelled --{key}"
    own, matches = f"--{key}" in TRAINING, list(_entries(key, flags))
    for tool, name, entry in matches:
        options, remark = entry
        if options and set(options_of(entry)) <= flags:
            return f"{missing}: it is {options} here{_theirs(tool, name, matches)}{_remark(remark)}"
        if not options and not own:
            return f"{missing}{_theirs(tool, name, matches)}: {remark}"
    if near_options(given, flags, MISSPELLED) and not own:
        return f"{missing}: {near_hint(given, flags)}"
    owner = _owner(key)
    if owner and (own or not any(tool for tool, _, _ in matches)):
        return f"{missing} in this command: it is one of {owner}"
    for tool, name, (options, remark) in matches:
        theirs = _theirs(tool, name, matches)
        return (
            f"{missing}: it is {options} of megajax train{theirs}, and this command has no such option{_remark(remark)}"
        )
    return f"{missing}: {near_hint(given, flags)}"


def _theirs(tool: str, name: str, matches: Sequence[tuple[str, str, Entry]]) -> str:
    """The tools that call an option so."""
    tools = dict.fromkeys(f"{one}'s" for one, other, _ in matches if one and key_of(other) == key_of(name))
    return f" ({' and '.join(tools)} {name})" if tool else ""


def _remark(text: str) -> str:
    return f"; {text}" if text else ""


def _owner(key: str) -> str:
    """The command that has an option of this name, "" if none has."""
    if f"--{key}" in TRAINING:
        return "megajax train"
    return next((f"megajax {command}" for command, names in COMMAND_OPTIONS.items() if f"--{key}" in names), "")


def _entries(key: str, flags: frozenset[str]) -> Iterator[tuple[str, str, Entry]]:
    """(tool, its name for the option, entry) of all that match: of this command first, then of the training."""
    own = flags - {"--help"} - {f"--no-{flag[2:]}" for flag in flags}
    command = min(
        (one for one, names in COMMAND_OPTIONS.items() if own <= names),
        key=lambda one: len(COMMAND_OPTIONS[one]),
        default="",
    )
    if entry := OF_COMMANDS.get(command, {}).get(f"--{key}"):
        yield "", "", entry
    named = [(tool, name, entry) for tool, entries in TOOLS.items() for name, entry in entries.items()]
    named += [("", name, entry) for name, entry in COMMON.items()]
    yield from (one for one in named if key_of(one[1]) == key)
    # torchtitan's names without their section, --seq_len, and sections that it does not have, --train.lr
    last = key.rpartition(".")[2]
    yield from (one for one in named if key_of(one[1]).rpartition(".")[2] == last and key_of(one[1]) != key)
