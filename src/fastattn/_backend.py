"""Which implementation runs: the first that accepts, or the one that was named."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_asking = False


class _Answer(Exception):  # noqa: N818
    def __init__(self, candidates: dict[str, str | None]) -> None:
        self.candidates = candidates


def refusals(call: Callable[[], Any]) -> dict[str, str | None]:
    """What each backend would say to this call of an op, in the order of choice; nothing runs."""
    global _asking
    _asking = True
    try:
        call()
    except _Answer as answer:
        return answer.candidates
    finally:
        _asking = False
    raise AssertionError("the call has asked for no backend")


def select(op: str, requested: str | None, **candidates: str | None) -> str:
    """Return the first backend that can run, in the order given.

    Each candidate maps a backend's name to why it refuses these inputs, or to None if it
    accepts them. A backend asked for by name, or by the environment variable
    ``FASTATTN_BACKEND``, runs or raises: it never falls back.

    Raises:
        ValueError: The requested backend does not exist or refuses these inputs.
    """
    if _asking:
        raise _Answer(candidates)
    requested = requested or os.environ.get("FASTATTN_BACKEND")
    if requested is None:
        return next(name for name, refusal in candidates.items() if refusal is None)
    if requested not in candidates:
        raise ValueError(f"{op} has no backend {requested!r}; it has {', '.join(candidates)}")
    if candidates[requested] is not None:
        raise ValueError(f"{op} cannot run on backend {requested!r}: {candidates[requested]}")
    return requested
