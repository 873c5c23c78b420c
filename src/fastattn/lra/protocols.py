"""Protocols: how published papers cut, split and select, so that a score says which one it follows.

A score of the Long Range Arena means little without its protocol: papers differ in the length of
the texts, in the difficulty of Pathfinder, and in whether they selected on the test set.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """What a paper's results say of the data; whatever it does not say is as in ``DEFAULT``.

    Args:
        name: What ``protocol=`` takes and every result records.
        source: Where the figures stand.
        differs: What of the source is not followed here.
        text_length: Bytes of a review that are read.
        validate_on_test: Text is validated on its test set, instead of a tenth of train.
        last_checkpoint: Tasks of which the last checkpoint is tested, instead of the best.
        retrieval_length: Bytes of each of the two documents that are read.
        pathfinder_sets: The sets of difficulty trained on; validation and test are of the last.
        pathfinder_shares: Train and validation, as shares of that set; the rest is the test.
    """

    name: str
    source: str
    differs: str = ""
    text_length: int = 4096
    validate_on_test: bool = False
    last_checkpoint: tuple[str, ...] = ()
    retrieval_length: int = 4000
    pathfinder_sets: tuple[str, ...] = ("hard",)
    pathfinder_shares: tuple[float, float] = (0.8, 0.1)


DEFAULT = Protocol(
    name="default",
    source="fastattn: texts of S4's length, nothing selected on a test set",
)

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        DEFAULT,
        Protocol(
            name="easy",
            source="the default, with the easy set of Pathfinder or Path-X",
            pathfinder_sets=("easy",),
        ),
        Protocol(
            name="intermediate",
            source="the default, with the intermediate set of Pathfinder or Path-X",
            pathfinder_sets=("intermediate",),
        ),
        Protocol(
            name="lra2020",
            source="Tay et al., arXiv:2011.04006, as in google-research/long-range-arena",
            differs=(
                "test batches are not dropped; Pathfinder is sliced in the order of its files, "
                "not in that of TFDS; lists end at 1999 tokens and are never cut off; grey levels "
                "are rounded, where its fractions are cut off"
            ),
            text_length=1000,
            validate_on_test=True,
            last_checkpoint=("listops", "text"),
        ),
        Protocol(
            name="s4",
            source="Gu et al., arXiv:2111.00396, as in state-spaces/s4",
            differs=(
                "texts are bytes: S4's characters are a vocabulary collected from the data; no "
                "end token; grey levels are tokens; validation sets of images and of Pathfinder "
                "are slices of S4's sizes, where S4 draws them with seed 42"
            ),
            validate_on_test=True,
        ),
        Protocol(
            name="mega",
            source="Ma et al., arXiv:2209.10655, as in facebookresearch/mega (imdb-4000)",
            differs="MEGA's preprocessed archive is not read: texts and splits are our own",
            text_length=4000,
        ),
        Protocol(
            name="locality",
            source=(
                "Miralles-González et al., arXiv:2501.14850: Pathfinder from all three sets, "
                "validated and tested on the hard one; it trains 67 epochs then"
            ),
            differs=(
                "which images of the easier sets are left out is not known: ours are those whose "
                "numbers the hard validation and test images have"
            ),
            retrieval_length=4096,
            pathfinder_sets=("easy", "intermediate", "hard"),
        ),
        Protocol(
            name="slides",
            source="Pathfinder's easy set, 70 % train, 15 % validation, 15 % test",
            differs="no image is lost, where the slides count 199,800",
            pathfinder_sets=("easy",),
            pathfinder_shares=(0.7, 0.15),
        ),
    )
}


def protocol_of(name: str | None) -> Protocol:
    """The protocol of a name; None means ``DEFAULT``.

    Raises:
        ValueError: There is none of that name.
    """
    name = DEFAULT.name if name is None else name
    if name not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {name!r}")
    return PROTOCOLS[name]
