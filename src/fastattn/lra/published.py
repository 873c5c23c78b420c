"""Published figures of the Long Range Arena, with their sources and how they came about.

They stand beside our own and are never mixed with them: the systems differ in tokens, lengths,
difficulty, validation, budget and pooling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fastattn.lra.tables import Table

TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")


class Setup(NamedTuple):
    """Where figures stand, and by task what is known of their making; a task may be missing.

    Args:
        source: The paper or page.
        data: What is read of the public files, and what is selected and tested on.
        training: Length of the run and batch, in the source or its code.
    """

    source: str
    data: Mapping[str, str]
    training: Mapping[str, str]


class Published(NamedTuple):
    """A row: accuracies as printed, in the order of ``TASKS``; "fail" is chance, "-" is none."""

    model: str
    setup: Setup
    accuracies: str


def _by_task(*values: str) -> dict[str, str]:
    """In the order of ``TASKS``; an empty one is not known."""
    return {task: value for task, value in zip(TASKS, values, strict=True) if value}


_TAY = Setup(
    "Tay et al. 2021, arXiv:2011.04006",
    _by_task(
        "2000 tokens, last checkpoint",
        "1000 bytes (in the paper up to 4000), validated on its test set, last checkpoint",
        "4000 bytes a document, 17,408 of 17,437 test pairs",
        "9,984 of 10,000 test pictures",
        "hard set",
        "hard set",
    ),
    _by_task(
        "5,000 steps, batch 32",
        "20,000 steps, batch 32",
        "5,000 steps, batch 32",
        "200 epochs, batch 256",
        "200 epochs, batch 512",
        "200 epochs, batch 64",
    ),
)
_NYSTROM = Setup(
    "Xiong et al. 2021, arXiv:2102.03902, a set-up of its own",
    {"image": "selected on the test set", "pathfinder": "split without a seed"},
    _by_task(
        "5,000 steps, batch 32",
        "20,000 steps, batch 32",
        "30,000 steps, batch 32",
        "35,000 steps, batch 256",
        "62,400 steps, batch 256",
        "",
    ),
)
_TLB = Setup(
    "google-research/long-range-arena, README",
    {"text": "4000 bytes"},
    {"retrieval": "20,000 steps, batch 128"},
)
_S4 = Setup(
    "state-spaces/s4, README",
    {
        "listops": "2048 tokens",
        "text": "4096 characters, validated on its test set",
        "retrieval": "4000 characters a document",
        "image": "validation drawn with seed 42",
        "pathfinder": "split drawn with seed 42",
    },
    _by_task(
        "40 epochs, batch 32",
        "32 epochs, batch 16",
        "20 epochs, batch 64",
        "200 epochs, batch 50",
        "200 epochs, batch 64",
        "50 epochs, batch 16",
    ),
)
_S5 = Setup(
    "Smith et al. 2022, arXiv:2208.04933",
    {},
    _by_task(
        "40 epochs, batch 50",
        "35 epochs",
        "20 epochs, batch 32",
        "250 epochs",
        "200 epochs, batch 64",
        "75 epochs, batch 32",
    ),
)
_MEGA = Setup(
    "Ma et al. 2022, arXiv:2209.10655",
    {"listops": "2002 tokens", "text": "4000 bytes"},
    _by_task(
        "90,000 steps, batch 64, one A100",
        "25,000 steps, batch 50, one A100",
        "92,000 steps, batch 64, one A100",
        "180,000 steps, batch 50, one A100",
        "250,000 steps, batch 128, one A100",
        "125,000 steps, eight A100",
    ),
)
_CHORD = Setup(
    "Khalitov et al. 2022, arXiv:2206.05852", {}, {"pathx": "at least four GPUs of 32 GB"}
)
_AMOS = Setup(
    "Amos et al. 2023, arXiv:2310.02980",
    {},
    dict.fromkeys(TASKS, "first on the task's own inputs, then on its labels"),
)
_LOCALITY = Setup(
    "Miralles-González et al. 2025, arXiv:2501.14850",
    {
        "text": "4096 bytes",
        "retrieval": "4096 bytes a document",
        "pathfinder": "trained on the easy, intermediate and hard sets, tested on the hard one",
    },
    _by_task(
        "120 epochs, batch 64",
        "80 epochs, batch 16",
        "60 epochs, batch 64",
        "200 epochs, batch 48",
        "67 epochs, batch 128",
        "",
    ),
)
_LOCALITY_GMLP = _LOCALITY._replace(
    data={"listops": "2000 tokens", **_LOCALITY.data},
    training={**_LOCALITY.training, "listops": "120 epochs, batch 32"},
)

PUBLISHED = (
    Published("Transformer", _TAY, "36.37 64.27 57.46 42.44 71.40 fail"),
    Published("Linformer", _TAY, "35.70 53.94 52.27 38.56 76.34 fail"),
    Published("BigBird", _TAY, "36.05 64.02 59.29 40.83 74.87 fail"),
    Published("Performer", _TAY, "18.01 65.40 53.82 42.77 77.05 fail"),
    Published("Linear Transformer (elu + 1)", _TAY, "16.13 65.90 53.09 42.34 75.30 fail"),
    Published("Nyströmformer", _NYSTROM, "37.15 65.52 79.56 41.58 70.94 -"),
    Published("Temporal Latent Bottleneck", _TLB, "37.05 81.88 76.91 57.51 79.06 fail"),
    Published("S4", _S4, "59.5 86.5 91.0 88.5 94.0 96.0"),
    Published("S5", _S5, "62.15 89.31 91.28 88.00 95.33 98.58"),
    Published("MEGA", _MEGA, "63.14 90.43 91.25 90.44 96.01 97.98"),
    Published("MEGA-chunk", _MEGA._replace(training={}), "58.76 90.19 90.97 85.80 94.41 93.81"),
    Published("ChordMixer", _CHORD, "59.89 88.87 90.38 89.95 96.67 98.63"),
    Published("Transformer, pre-trained by denoising", _AMOS, "61.49 91.02 91.57 86.04 94.16 -"),
    Published("Rotary Transformer, with techniques", _LOCALITY, "62.90 90.33 90.80 88.15 96.28 -"),
    Published("gMLP, with techniques", _LOCALITY_GMLP, "62.45 89.94 90.37 89.89 97.26 -"),
)

# steps a second over the Transformer's, and GB, as printed, at 4K tokens on TPUv3
_SPEED = {
    "Transformer": ("1.0", "9.48"),
    "Performer": ("5.7", "1.06"),
    "Linear Transformer": ("5.6", "1.03"),
    "Linformer": ("5.5", "0.99"),
    "BigBird": ("1.1", "2.88"),
    "Reformer": ("0.8", None),
}


def published(task: str) -> Table:
    """The published accuracies of a task, in the order of ``PUBLISHED``.

    Raises:
        ValueError: No such task.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    shown = [(row, row.accuracies.split()[TASKS.index(task)]) for row in PUBLISHED]
    rows = [
        (
            row.model,
            accuracy,
            "; ".join(filter(None, ["public files", row.setup.data.get(task)])),
            row.setup.training.get(task),
            row.setup.source,
        )
        for row, accuracy in shown
        if accuracy != "-"
    ]
    return Table(("model", "accuracy, %", "data", "training", "source"), rows)


def published_speed() -> Table:
    """Speed and memory of the Long Range Arena's own models, as its paper has them."""
    rows = [(model, *numbers, _TAY.source) for model, numbers in _SPEED.items()]
    return Table(("model", "steps a second, Transformer = 1", "memory, GB", "source"), rows)
