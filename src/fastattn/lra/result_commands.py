"""The commands ``fastattn-lra analyze`` and ``report``, which read what runs have left."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path


def add_analyze(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastattn-lra analyze``."""
    parser.set_defaults(run=_analyze)
    parser.add_argument("--run", dest="runs", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for tables and pictures")
    parser.add_argument(
        "--what",
        type=lambda names: names.split(","),
        help="of roots,multiplication,reach,memory,speed,curves,curriculum,features; "
        "default: what applies",
    )
    parser.add_argument("--data-dir", type=Path, help="instead of the data it was trained on")
    parser.add_argument("--batch-size", type=int, help="of measured steps; default: the recipe's")
    parser.add_argument(
        "--max-length",
        type=int,
        default=16384,
        help="tokens up to which memory is measured, at powers of two from 512",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N,...",
        help="instead: the lengths at which memory is measured, as in 512,1024,10000",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="of the GPU that a step of memory may have; default: all",
    )
    parser.add_argument(
        "--samples", type=int, help="of the test set, to be multiplied; default: all"
    )
    parser.add_argument("--steps", type=int, default=10, help="training steps to time")


def add_report(parser: argparse.ArgumentParser) -> None:
    """The options of ``fastattn-lra report``."""
    parser.set_defaults(run=_report)
    parser.add_argument("directory", type=Path, metavar="DIR", help="with runs, at any depth")
    parser.add_argument("--out", type=Path, metavar="PAGE.md", help="default: DIR/report.md")


def _lengths(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be numbers with commas between them, got {text!r}"
        ) from None


def _analyze(options: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", module="lightning")
    try:  # late: Lightning takes seconds, and may be missing
        from fastattn.lra.analyses import Options, analyze
    except ImportError as error:
        raise ValueError(
            f"analyses need the extra: pip install 'fastattn[lra]' ({error})"
        ) from None
    how = Options(
        data_dir=options.data_dir,
        batch_size=options.batch_size,
        max_length=options.max_length,
        lengths=options.lengths,
        memory_limit=options.memory_limit,
        samples=options.samples,
        steps=options.steps,
    )
    for line in analyze(options.runs, options.out, options.what, how):
        print(line)
    return 0


def _report(options: argparse.Namespace) -> int:
    from fastattn.lra.reports import write_report

    page = options.out or options.directory / "report.md"
    found = write_report(options.directory, page)
    for path, why in found.skipped.items():
        print(f"skipped: {path}: {why}", file=sys.stderr)
    print(f"{len(found.results)} runs, written to {page}")
    return 0
