"""A Jinja environment for templates that anybody may have written: what they compute is bounded.

jinja2's sandbox keeps a template from Python's internals, not from a loop that never ends or a text without end. Here each
call, operator and item of a `range` counts, and so do the characters of each text that is made.
"""

from types import ModuleType
from typing import Any

MOST_OPERATIONS = 5_000_000  # of one text; a chat of 10,000 turns has a tenth of it
CALL = 10  # operations; a macro takes as long
MOST_CHARACTERS = 50_000_000  # of one text, or elements of a list
GROWING = (
    "replace",
    "ljust",
    "rjust",
    "center",
    "zfill",
    "expandtabs",
    "join",
)  # methods of a text, by their arguments


class TooMuch(Exception):
    """A template computes without end."""


def bounded_environment(jinja2: ModuleType) -> type:
    """The class of the environment; a function, because jinja2 is optional."""

    class Generator(jinja2.compiler.CodeGenerator):
        def visit_Concat(self, node, frame):  # noqa: N802 (jinja2's interface)
            self.write("environment.concatenate((")
            for one in node.nodes:
                self.visit(one, frame)
                self.write(", ")
            self.write("))")

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Counts operations; `begin` starts a new text."""

        code_generator_class = Generator
        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def __init__(self, **settings):
            super().__init__(**settings)
            self.globals["range"] = self._range
            self.begin()

        def begin(self) -> None:
            self.operations = 0

        def spend(self, operations: int = 1) -> None:
            self.operations += operations
            if self.operations > MOST_OPERATIONS:
                raise TooMuch(f"it takes more than {MOST_OPERATIONS:,} operations")

        def _range(self, *bounds):
            found = range(*bounds)
            self.spend(1 + len(found))
            return found

        def call(self, context, function, *arguments, **named):
            self.spend(CALL)
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if isinstance(owner, str) and name in GROWING:
                _require(_most_characters(owner, name, arguments))
            return _checked(super().call(context, function, *arguments, **named))

        def call_binop(self, context, operator, left, right):
            self.spend()
            if operator == "*":
                sizes = [_size(one) if isinstance(one, str | list | tuple) else None for one in (left, right)]
                factor = right if sizes[0] is not None else left
                size = next((one for one in sizes if one is not None), None)
                if size is not None and isinstance(factor, int):
                    _require(size * factor)
            if operator == "**":
                _require(abs(_number(left)).bit_length() * max(1, abs(_number(right))))
            if operator == "%" and isinstance(left, str):
                _require(sum(int(digits) for digits in _numbers(left)))
            return _checked(super().call_binop(context, operator, left, right))

        def concatenate(self, values) -> str:
            """The operator ~."""
            texts = [str(one) for one in values]
            self.spend(1 + sum(map(len, texts)) // 1000)
            _require(sum(map(len, texts)))
            return "".join(texts)

    return Environment


def _size(value: Any) -> int:
    return len(value)


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and abs(value) < 1e300 else 0


def _numbers(form: str) -> list[str]:
    """The widths and precisions in a format."""
    found = "".join(character if character.isdigit() else " " for character in form).split()
    return [digits if len(digits) < 12 else "9" * 12 for digits in found]


def _most_characters(text: str, method: str, arguments: tuple) -> int:
    """Of the result of a method that may grow a text."""
    if method == "replace" and len(arguments) > 1 and isinstance(arguments[1], str):
        return (len(text) + 1) * (1 + len(arguments[1]))
    if method == "join" and arguments and hasattr(arguments[0], "__len__"):
        return (len(text) + 1) * len(arguments[0]) + sum(len(one) for one in arguments[0] if isinstance(one, str))
    if method == "expandtabs":
        return len(text) * (1 + _number(arguments[0] if arguments else 8))
    return len(text) + (_number(arguments[0]) if arguments else 0)


def _require(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TooMuch(f"it makes a text or list of more than {MOST_CHARACTERS:,} elements")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _require(len(value))
    return value
