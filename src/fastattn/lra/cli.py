"""The command ``fastattn-lra``: generate, unpack, verify, fit, test, analyze, report."""

from __future__ import annotations

import argparse
import inspect
import itertools
import logging
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastattn.lra import files
from fastattn.lra.analysis import shared
from fastattn.lra.archives import unpack
from fastattn.lra.data import Task
from fastattn.lra.denoise import DENOISE
from fastattn.lra.encoder import EMBEDDINGS, MIXERS, NORMS, POSITIONS, mixers_of
from fastattn.lra.protocols import PROTOCOLS
from fastattn.lra.recipe import DECAYS
from fastattn.lra.recipes import RECIPES
from fastattn.lra.result_commands import add_analyze, add_report
from fastattn.lra.tasks import TASKS
from fastattn.lra.tasks.pathfinder_files import SETS


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
    except SystemExit as end:
        if end.code != 128 + signal.SIGTERM:
            raise
        print(
            "fastattn-lra: told to end (SIGTERM); --resume goes on from the last checkpoint",
            file=sys.stderr,
        )
        return 128 + signal.SIGTERM


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastattn-lra", description="Long Range Arena: data, training and tests."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="write a task's public files, or a stand-in for them, from a seed",
        allow_abbrev=False,
    )
    tasks = generate.add_subparsers(required=True, metavar="TASK", dest="task")
    for name, task in TASKS.items():
        about = (inspect.getdoc(task.generate) or "").partition("\n")[0].replace("``", "")
        _add_generate(
            tasks.add_parser(name, help=about, description=about, allow_abbrev=False), task
        )

    unpack = commands.add_parser("unpack", help="unpack an archive", allow_abbrev=False)
    unpack.set_defaults(run=_unpack)
    unpack.add_argument("archive", type=Path, help="a tar, compressed or not, or a zip")
    unpack.add_argument("--out", type=Path, required=True, help="directory to write")

    verify = commands.add_parser(
        "verify", help="counts, labels, fingerprints and floors of a data set", allow_abbrev=False
    )
    verify.set_defaults(run=_verify)
    verify.add_argument("data_dir", type=Path, metavar="DIR")
    verify.add_argument("--task", choices=TASKS, help="default: all whose files are there")
    _add_protocol(verify)

    fit = commands.add_parser("fit", help="train a classifier", allow_abbrev=False)
    fit.set_defaults(run=_fit)
    fit.add_argument("--task", choices=TASKS, required=True)
    fit.add_argument("--data-dir", type=Path, required=True)
    _add_protocol(fit)
    fit.add_argument(
        "--mixer",
        type=_mixers,
        help="the recipe's if it has one; "
        f"{', '.join(MIXERS)}; or several in one argument, one a block: 'bigbird linear'; "
        "options behind a colon: bigbird:block_size=32,num_random_blocks=4",
    )
    fit.add_argument("--recipe", choices=RECIPES, default="smoke")
    fit.add_argument("--out", type=Path, required=True, help="run directory to write")
    fit.add_argument("--max-steps", type=int, help="cut the run off after so many steps")
    fit.add_argument("--seed", type=int, help="instead of the recipe's")
    fit.add_argument(
        "--seeds",
        type=_seeds,
        help="several, 0,1,2: a run each, one after another, and summary.json in --out",
    )
    fit.add_argument("--positions", choices=POSITIONS, help="instead of the recipe's")
    fit.add_argument("--pool", help="mean, cls, last or attention:hops=4, instead of the recipe's")
    fit.add_argument(
        "--embedding",
        choices=EMBEDDINGS,
        help="of ids: a table of vectors, or of grey levels numbers, instead of the recipe's",
    )
    fit.add_argument("--norm", choices=NORMS, help="of tokens or batches, instead of the recipe's")
    fit.add_argument(
        "--augment",
        type=_augment,
        help="true, the task's own; false; or of pictures d4, d4:elements=3, grey, 'd4 grey'",
    )
    fit.add_argument(
        "--denoise",
        choices=DENOISE,
        help="a second task beside the classification, or alone, for --from: name hidden tokens, "
        "or grey levels",
    )
    fit.add_argument("--lr", type=float, help="learning rate, in every phase")
    fit.add_argument(
        "--decay",
        choices=DECAYS,
        help="of the learning rate, in every phase; onecycle takes the place of the warm-up",
    )
    fit.add_argument("--accumulate", type=int, help="compute a batch in so many shares")
    fit.add_argument("--devices", type=int, default=1, help="GPUs of a host, or processes")
    fit.add_argument("--nodes", type=int, default=1, help="hosts; start the command on each")
    fit.add_argument(
        "--checkpoint-pieces", action="store_true", help="no checkpoint file above 16 MB"
    )
    fit.add_argument("--workers", type=int, help="loader processes of each device")
    fit.add_argument(
        "--compile", action="store_true", help="train by torch.compile and CUDA graphs"
    )
    fit.add_argument(
        "--from",
        dest="begin",
        type=Path,
        metavar="RUN",
        help="begin with what fits of this run's best weights",
    )
    fit.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")

    test = commands.add_parser("test", help="test a run", allow_abbrev=False)
    test.set_defaults(run=_test)
    test.add_argument("--run", dest="run_dir", type=Path, required=True)
    test.add_argument("--data-dir", type=Path, help="instead of the data it was trained on")
    _add_protocol(test, "instead of the run's")
    test.add_argument("--devices", type=int, default=1, help="GPUs of this host, or processes")
    test.add_argument(
        "--require-above-floors",
        type=float,
        metavar="POINTS",
        help="exit with code 1 unless the accuracy is so many points above every floor",
    )
    add_analyze(commands.add_parser("analyze", help="analyse runs", allow_abbrev=False))
    add_report(commands.add_parser("report", help="a page of many runs", allow_abbrev=False))
    return parser


def _add_protocol(
    parser: argparse.ArgumentParser, help: str = "how to cut and split; default: our own"
) -> None:
    parser.add_argument("--protocol", choices=PROTOCOLS, help=help)


# What the generators take. An option is that of a task where its generator has the parameter.
_GENERATE: dict[str, dict[str, Any]] = {
    "seed": {"type": int},
    "n": {"type": int, "help": "images in all, 8, 1 and 1 tenths, instead of the next three"},
    "num_train": {"type": int},
    "num_val": {"type": int},
    "num_test": {"type": int},
    "min_length": {"type": int, "help": "shortest list, in tokens"},
    "max_length": {"type": int, "help": "longest list, in tokens"},
    "size": {"type": int, "choices": (32, 64, 128, 256), "help": "pixels a side"},
    "difficulty": {"choices": tuple(SETS), "help": "contours of 6, 9 or 14 segments"},
    "ease": {"type": float, "help": "of 128 pixels, a curriculum's dial: 0, easy, to 3"},
    "source": {"type": Path, "help": "a package's folder to build from, instead of the seed"},
    "workers": {"type": int, "help": "processes or threads; one per core by default"},
}


def _add_generate(parser: argparse.ArgumentParser, task: Task) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    for name, parameter in inspect.signature(task.generate).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, default=parameter.default, **_GENERATE[name])


def _mixers(text: str) -> str:
    try:
        mixers_of(text)
        return " ".join(text.split())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seeds(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _augment(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _generate(options: argparse.Namespace) -> int:
    task = TASKS[options.task]
    given = {name: value for name, value in vars(options).items() if name in _GENERATE}
    task.generate(options.out, **given)
    record = files.generated(options.out) or {}
    kind = record.get("stand_in") if record.get("task") == options.task else None
    said = f"; stand-in, not LRA: {kind}" if kind else ""
    print(f"{options.task} written to {options.out}{said}")
    return 0


def _unpack(options: argparse.Namespace) -> int:
    unpack(options.archive, options.out)
    names = sorted(path.name for path in options.out.iterdir())
    print(f"unpacked to {options.out}: {', '.join(names)}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    files.places(options.data_dir, "")  # no directory is one error, not one for each task
    absent: dict[str, ValueError] = {}
    code = 0
    for name in [options.task] if options.task else TASKS:
        try:
            _verify_task(TASKS[name], options)
        except files.NotHereError as error:
            absent[name] = error
        except (ValueError, OSError) as error:  # some of its files are there, or damaged
            print(f"fastattn-lra: {name}: {error}", file=sys.stderr)
            code = 2
    if options.task in absent:
        raise absent[options.task]
    if len(absent) == len(TASKS):
        errors = [f"{name}: {error}" for name, error in absent.items()]
        raise ValueError("no task's files are there\n" + "\n".join(errors))
    if not options.task:
        print(f"not here: {', '.join(absent) or 'nothing'}")
    return code


def _verify_task(task: Task, options: argparse.Namespace) -> None:
    data = task.load(options.data_dir, options.protocol)
    print(f"{task.name} in {data.record['folder']}, protocol {data.record['protocol']}")
    _print_notes(data.record)
    for part, split in data.items():
        lengths, labels = split.document_lengths, split.labels
        shares = [f"{(labels == c).mean():.3f}" for c in range(task.num_classes)]
        print(f"{part}: {len(split)} samples, fingerprint {split.fingerprint()}")
        print(f"  lengths {lengths.min()} to {lengths.max()}, mean {lengths.mean():.1f}")
        print(f"  labels 0 to {task.num_classes - 1}: {' '.join(shares)}")
        print("  floors: " + _floors(task.floors(split)))
        losses = [f"{name} {loss:.3f}" for name, loss in task.chance(split).items()]
        print(f"  losses, in nats, of guessing from: {', '.join(losses)}")
    for (one, a), (other, b) in itertools.combinations(data.items(), 2):
        if common := shared(a, b):
            print(f"note: {common} samples of {other} are in {one} as well")


def _print_notes(record: dict[str, Any]) -> None:
    if record.get("stand_in"):
        print(f"stand-in, not LRA: {record['stand_in']}")
    elif record.get("generated"):
        given = {name: value for name, value in record["generator"].items() if value is not None}
        origin = ", ".join(f"{name} {value}" for name, value in given.items())
        print(f"generated, not the public files: {origin}")
    for note in record.get("notes", ()):
        print(f"note: {note}")


def _fit(options: argparse.Namespace) -> int:
    recipe = RECIPES[options.recipe]
    for name in ("seed", "embedding", "norm", "positions", "pool", "augment", "accumulate"):
        if getattr(options, name) is not None:
            recipe = replace(recipe, **{name: getattr(options, name)})
    changed = {k: getattr(options, k) for k in ("lr", "decay") if getattr(options, k) is not None}
    if changed:
        phases = tuple(replace(phase, **changed) for phase in recipe.phases)
        warmup = 0 if options.decay == "onecycle" else recipe.warmup
        recipe = replace(recipe, phases=phases, warmup=warmup)
    if options.denoise is not None:
        recipe = replace(recipe, denoise=DENOISE[options.denoise])
    if options.max_steps is not None:
        recipe = recipe.at_most(options.max_steps)
    mixer = options.mixer or recipe.mixer
    if mixer is None:
        raise ValueError(f"--mixer must be given: recipe {recipe.name} has none of its own")
    runs = _runs()
    given: dict[str, Any] = {
        "workers": options.workers,
        "resume": options.resume,
        "protocol": options.protocol,
        "pieces": options.checkpoint_pieces,
        "begin": options.begin,
        "compiled": options.compile,
    }
    if options.seeds is not None:
        if options.seed is not None or options.devices * options.nodes != 1:
            raise ValueError("--seeds takes the place of --seed, and trains on one device")
        from fastattn.lra import seeds

        where = (options.task, options.data_dir, recipe, mixer, options.out)
        _print_summary(seeds.fit_seeds(*where, options.seeds, **given))
        return 0
    given |= {"devices": options.devices, "nodes": options.nodes}
    result = runs.fit(options.task, options.data_dir, recipe, mixer, options.out, **given)
    if not runs.is_first():
        return 0
    _print_notes(result["data"])
    best = result["fit"]["best"]
    at = f"at step {best['step']}, {result['fit']['seconds']:.0f} s of training"
    if "val_accuracy" in best:
        accuracy = f"validation accuracy {100 * best['val_accuracy']:.2f} %"
        print(f"{accuracy} {at}; floors: {_floors(result['floors'])}")
    else:
        print(f"validation loss of denoising {best['val_denoise_loss']:.4f} {at}")
    print(f"written to {options.out}: result.json, curve.png, checkpoints")
    return 0


def _test(options: argparse.Namespace) -> int:
    runs = _runs()
    given = {"protocol": options.protocol, "devices": options.devices}
    if (options.run_dir / "summary.json").is_file():
        if options.require_above_floors is not None or options.devices != 1:
            raise ValueError(
                f"{options.run_dir} has several seeds: --devices and --require-above-floors are "
                "for one of them"
            )
        from fastattn.lra import seeds

        _print_summary(seeds.evaluate_seeds(options.run_dir, options.data_dir, **given))
        return 0
    result = runs.evaluate(options.run_dir, options.data_dir, **given)["test"]
    if not runs.is_first():
        return 0
    floors = result["floors"]
    _print_notes(result)
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


def _print_summary(summary: dict[str, Any]) -> None:
    _print_notes(summary["data"])
    failed = summary["failed"]
    told = "".join(f"; seed {seed} failed: {why}" for seed, why in failed.items())
    print(f"{summary['seeds'] - len(failed)} of {summary['seeds']} seeds did not fail{told}")
    for name in ("val_accuracy", "test_accuracy", "val_denoise_loss"):
        found = summary.get(name)
        if found and found["mean"] is not None:
            spread = "" if found["spread"] is None else f" ± {found['spread']:.4f}"
            print(f"{name} of those: {found['mean']:.4f}{spread}")


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
