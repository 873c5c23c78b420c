"""The tasks of the Long Range Arena, one file each, by name."""

from __future__ import annotations

from fastattn.lra.data import Task
from fastattn.lra.tasks.image import IMAGE
from fastattn.lra.tasks.listops import LISTOPS
from fastattn.lra.tasks.pathfinder import PATHFINDER, PATHX
from fastattn.lra.tasks.retrieval import RETRIEVAL
from fastattn.lra.tasks.text import TEXT

TASKS: dict[str, Task] = {
    task.name: task for task in (LISTOPS, TEXT, RETRIEVAL, IMAGE, PATHFINDER, PATHX)
}

__all__ = ["IMAGE", "LISTOPS", "PATHFINDER", "PATHX", "RETRIEVAL", "TASKS", "TEXT"]
