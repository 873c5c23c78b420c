"""Names with options, as a command line has them: "bigbird:num_random_blocks=4 linear"."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Named = tuple[str, dict[str, Any]]


def read_name(word: str, known: Mapping[str, Sequence[str]]) -> Named:
    """A name and its options.

    Args:
        word: ``name`` or ``name:option=value,option=value``.
        known: The names there are, and their options.

    Raises:
        KeyError: No such name.
        ValueError: No such option.
    """
    name, _, rest = word.partition(":")
    allowed = known[name]
    options = {}
    for pair in filter(None, rest.split(",")):
        option, _, value = pair.partition("=")
        if option not in allowed:
            names = ", ".join(allowed) or "none"
            raise ValueError(f"options of {name} are {names}, got {option!r}")
        options[option] = _value(value)
    return name, options


@contextmanager
def options_fit(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """While something is made of these options: what is wrong with their types is a ValueError."""
    try:
        yield
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"options of {name} do not fit, got {options}: {error}") from None


def _value(text: str) -> Any:
    """A Python literal, true or false in any case, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text
