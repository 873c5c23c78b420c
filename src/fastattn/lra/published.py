"""Published accuracies of the Long Range Arena, in percent, with their sources.

They stand beside our own and are never mixed with them: the systems differ in tokens, lengths,
difficulty, validation and pooling.
"""

from __future__ import annotations

from typing import NamedTuple

from fastattn.lra.tables import Table

TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")

_TAY = "Tay et al. 2021, arXiv:2011.04006"
_MEGA = "Ma et al. 2022, arXiv:2209.10655"
_001 = "Miralles-González et al. 2025, arXiv:2501.14850"


class Published(NamedTuple):
    """A row: accuracies as printed, in the order of ``TASKS``; "fail" is chance, "-" is none."""

    model: str
    source: str
    accuracies: str


PUBLISHED = (
    Published("Transformer", _TAY, "36.37 64.27 57.46 42.44 71.40 fail"),
    Published("Linformer", _TAY, "35.70 53.94 52.27 38.56 76.34 fail"),
    Published("BigBird", _TAY, "36.05 64.02 59.29 40.83 74.87 fail"),
    Published("Performer", _TAY, "18.01 65.40 53.82 42.77 77.05 fail"),
    Published("Linear Transformer (elu + 1)", _TAY, "16.13 65.90 53.09 42.34 75.30 fail"),
    Published(
        "Nyströmformer",
        "Xiong et al. 2021, arXiv:2102.03902, a set-up of its own",
        "37.15 65.52 79.56 41.58 70.94 -",
    ),
    Published(
        "Temporal Latent Bottleneck",
        "google-research/long-range-arena, README",
        "37.05 81.88 76.91 57.51 79.06 fail",
    ),
    Published("S4", "state-spaces/s4, README", "59.5 86.5 91.0 88.5 94.0 96.0"),
    Published("S5", "Smith et al. 2022, arXiv:2208.04933", "62.15 89.31 91.28 88.00 95.33 98.58"),
    Published("MEGA", _MEGA, "63.14 90.43 91.25 90.44 96.01 97.98"),
    Published("MEGA-chunk", _MEGA, "58.76 90.19 90.97 85.80 94.41 93.81"),
    Published(
        "ChordMixer",
        "Khalitov et al. 2022, arXiv:2206.05852",
        "59.89 88.87 90.38 89.95 96.67 98.63",
    ),
    Published(
        "Transformer, pre-trained by denoising",
        "Amos et al. 2023, arXiv:2310.02980",
        "61.49 91.02 91.57 86.04 94.16 -",
    ),
    Published("Rotary Transformer, with techniques", _001, "62.90 90.33 90.80 88.15 96.28 -"),
    Published("gMLP, with techniques", _001, "62.45 89.94 90.37 89.89 97.26 -"),
)


def published(task: str) -> Table:
    """The published accuracies of a task, in the order of ``PUBLISHED``.

    Raises:
        ValueError: No such task.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    shown = [(row, row.accuracies.split()[TASKS.index(task)]) for row in PUBLISHED]
    rows = [(row.model, x, row.source) for row, x in shown if x != "-"]
    return Table(("model", "accuracy, %", "source"), rows)
