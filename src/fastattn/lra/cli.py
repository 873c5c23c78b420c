"""The command ``fastattn-lra``: generate, verify, fit, test."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from fastattn.lra.encoder import MIXERS, POSITIONS, mixers_of
from fastattn.lra.recipes import RECIPES
from fastattn.lra.tasks import TASKS


def main(arguments: list[str] | None = None) -> int:
    """Run the command; bad input ends it with one sentence and exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"fastattn-lra: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fastattn-lra: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastattn-lra", description="Long Range Arena: data, training and tests."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="write a task's public files, from a seed alone", allow_abbrev=False
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("task", choices=TASKS)
    generate.add_argument("--out", type=Path, required=True, help="directory to write")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--num-train", type=int, default=96_000)
    generate.add_argument("--num-val", type=int, default=2_000)
    generate.add_argument("--num-test", type=int, default=2_000)
    generate.add_argument("--min-length", type=int, default=501, help="shortest list, in tokens")
    generate.add_argument("--max-length", type=int, default=1999, help="longest list, in tokens")
    generate.add_argument("--workers", type=int, help="processes; one per core by default")

    verify = commands.add_parser(
        "verify", help="counts, labels, fingerprints and floors of a data set", allow_abbrev=False
    )
    verify.set_defaults(run=_verify)
    verify.add_argument("data_dir", type=Path, metavar="DIR")
    verify.add_argument("--task", choices=TASKS, default="listops")

    fit = commands.add_parser("fit", help="train a classifier", allow_abbrev=False)
    fit.set_defaults(run=_fit)
    fit.add_argument("--task", choices=TASKS, required=True)
    fit.add_argument("--data-dir", type=Path, required=True)
    fit.add_argument(
        "--mixer",
        type=_mixers,
        required=True,
        help=f"{', '.join(MIXERS)}; or several in one argument, one a block: 'bigbird linear'; "
        "options behind a colon: bigbird:block_size=32,num_random_blocks=4",
    )
    fit.add_argument("--recipe", choices=RECIPES, default="smoke")
    fit.add_argument("--out", type=Path, required=True, help="run directory to write")
    fit.add_argument("--max-steps", type=int, help="cut the run off after so many steps")
    fit.add_argument("--seed", type=int, help="instead of the recipe's")
    fit.add_argument("--positions", choices=POSITIONS, help="instead of the recipe's")
    fit.add_argument("--workers", type=int, help="loader processes")
    fit.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")

    test = commands.add_parser("test", help="test a run", allow_abbrev=False)
    test.set_defaults(run=_test)
    test.add_argument("--run", dest="run_dir", type=Path, required=True)
    test.add_argument("--data-dir", type=Path, help="instead of the data it was trained on")
    test.add_argument(
        "--require-above-floors",
        type=float,
        metavar="POINTS",
        help="exit with code 1 unless the accuracy is so many points above every floor",
    )
    return parser


def _mixers(text: str) -> str:
    try:
        mixers_of(text)
        return " ".join(text.split())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _generate(options: argparse.Namespace) -> int:
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"{options.out} is not empty: name another directory")
    TASKS[options.task].generate(
        options.out,
        seed=options.seed,
        num_train=options.num_train,
        num_val=options.num_val,
        num_test=options.num_test,
        min_length=options.min_length,
        max_length=options.max_length,
        workers=options.workers,
    )
    print(f"{options.task} written to {options.out}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    task = TASKS[options.task]
    for name, split in task.load(options.data_dir).items():
        lengths, labels = split.lengths, split.labels
        shares = [f"{(labels == c).mean():.3f}" for c in range(task.num_classes)]
        print(f"{name}: {len(split)} samples, fingerprint {split.fingerprint()}")
        print(f"  lengths {lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}")
        print(f"  labels 0 to {task.num_classes - 1}: {' '.join(shares)}")
        print("  floors: " + _floors(task.floors(split)))
    return 0


def _fit(options: argparse.Namespace) -> int:
    recipe = RECIPES[options.recipe]
    if options.seed is not None:
        recipe = replace(recipe, seed=options.seed)
    if options.positions is not None:
        recipe = replace(recipe, positions=options.positions)
    if options.max_steps is not None:
        recipe = recipe.at_most(options.max_steps)
    result = _runs().fit(
        options.task,
        options.data_dir,
        recipe,
        options.mixer,
        options.out,
        workers=options.workers,
        resume=options.resume,
    )
    best = result["fit"]["best"]
    print(
        f"validation accuracy {100 * best['val_accuracy']:.2f} % at step {best['step']}, "
        f"{result['fit']['seconds']:.0f} s of training; floors: {_floors(result['floors'])}"
    )
    print(f"written to {options.out}: result.json, curve.png, checkpoints")
    return 0


def _test(options: argparse.Namespace) -> int:
    result = _runs().evaluate(options.run_dir, options.data_dir)["test"]
    floors = result["floors"]
    if not result["data_of_the_run"]:
        print("note: this is not the test set that belongs to the run's training data")
    print(
        f"test accuracy {100 * result['accuracy']:.2f} % on {result['samples']} samples; "
        f"floors: {_floors(floors)}"
    )
    margin = 100 * (result["accuracy"] - max(floors.values()))
    wanted = options.require_above_floors
    if wanted is not None and margin < wanted:
        print(
            f"fastattn-lra: only {margin:.2f} points above the floors, not {wanted}",
            file=sys.stderr,
        )
        return 1
    return 0


def _runs():  # type: ignore[no-untyped-def]
    """The module that trains, imported late: Lightning takes seconds, and may be missing."""
    warnings.filterwarnings("ignore", module="lightning")
    try:
        from fastattn.lra import runs
    except ImportError as error:
        raise ValueError(
            f"training needs the extra: pip install 'fastattn[lra]' ({error})"
        ) from None
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return runs


def _floors(floors: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * value:.2f} %" for name, value in floors.items())


if __name__ == "__main__":
    sys.exit(main())
