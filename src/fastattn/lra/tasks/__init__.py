"""The tasks of the Long Range Arena, one file each, by name."""

from __future__ import annotations

from fastattn.lra.data import Task
from fastattn.lra.tasks.listops import LISTOPS

TASKS: dict[str, Task] = {"listops": LISTOPS}

__all__ = ["LISTOPS", "TASKS"]
