"""ListOps: the value of a nested list of MIN, MAX, MED and SM over digits, a label of 0 to 9.

Task: Nangia and Bowman, arXiv:1804.06028. Lengths, depth and files: Long Range Arena,
Tay et al., arXiv:2011.04006 (500 < n < 2000 tokens, at most 10 levels, at most 10 arguments).

A token is a digit, an operator with its opening bracket, or a closing bracket. The parentheses
of the public text carry no information and are dropped. A batch of expressions is handled as a
forest: its nodes level by level, so that every pass is a few numpy calls a level.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fastattn.lra import files
from fastattn.lra.data import Data, Indices, Split, Tokens, Vocabulary
from fastattn.lra.protocols import protocol_of

_OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = Vocabulary(
    ("<pad>", "<unk>", "<cls>", "<eos>", "<mask>", *"0123456789", *_OPERATORS, "]")
)
ZERO = 5  # the id of "0"
MIN, MAX, MED, SM, CLOSE = range(15, 20)
FILES = {"train": "basic_train.tsv", "val": "basic_val.tsv", "test": "basic_test.tsv"}

_DEPTH = 10  # levels of nodes; the last has digits only
_BLOCK = 8192  # candidate trees drawn together: part of what a seed means
_BARREN = 64  # blocks without a new sample after which the length range is called hopeless
_HEADER = ("Source", "Target")
# Without "<pad>" and its like, which must not be read from a file.
_IDS = {VOCABULARY.tokens[i].encode(): i for i in range(ZERO, len(VOCABULARY))}
_RISE = np.array([0] * MIN + [1] * 4 + [-1], np.int8)  # (20,) what a token adds to the depth


class _Forest(NamedTuple):
    """Nodes of many trees: level by level, tree by tree, then in the order of the text.

    So the arguments of an operator are neighbours, and lie in the order of their operators.
    """

    token: Tokens  # (nodes,) the digit or the operator
    arity: Indices  # (operators,) how many arguments each has
    levels: list[int]  # where each level begins, and at last the number of nodes


def evaluate(tokens: Sequence[int] | Tokens) -> int:
    """The value of one sample, ``(n,)``, by a plain stack machine: read this first, test by it."""
    stack: list[list[int]] = [[]]
    for token in map(int, tokens):
        if token < CLOSE:
            stack[-1].append(token)
        if MIN <= token < CLOSE:
            stack.append([])
        if token == CLOSE:
            values = sorted(argument - ZERO for argument in stack.pop())
            operator, n = stack[-1].pop(), len(values)
            median = (values[(n - 1) // 2] + values[n // 2]) // 2  # floor, as int() in the source
            value = {MIN: values[0], MAX: values[-1], MED: median, SM: sum(values) % 10}[operator]
            stack[-1].append(ZERO + value)
    return stack[0][0] - ZERO


def _plant(tokens: Tokens) -> tuple[_Forest, Indices]:
    """The forest of complete expressions, ``(total,)``, and where each of its nodes stands."""
    rise = _RISE[tokens]
    depth = np.cumsum(rise, dtype=np.int64) - (rise > 0)
    # The narrowest dtype: on one or two bytes numpy's stable sort is a radix sort.
    at = np.argsort(depth.astype(np.min_scalar_type(depth.max())), kind="stable")
    at = at[tokens[at] != CLOSE]
    token, depth = tokens[at], depth[at]
    key = depth * len(tokens) + at  # rises along the nodes
    # An operator's first argument is the first node one level below and right of it.
    first = np.searchsorted(key, key[token >= MIN] + len(tokens))
    arity = np.diff(first, append=len(at))
    levels = np.searchsorted(depth, np.arange(depth[-1] + 2)).tolist()
    return _Forest(token, arity, levels), at


def _sizes_and_values(forest: _Forest) -> tuple[Indices, Indices]:
    """Tokens under each node, and its value, both ``(nodes,)``, from the leaves up."""
    token, arity, levels = forest
    size = np.ones(len(token), np.int64)
    value = token.astype(np.int64) - ZERO
    operators = np.flatnonzero(token >= MIN)
    stop = len(operators)
    for level in reversed(range(len(levels) - 2)):
        start = int(np.searchsorted(operators, levels[level]))
        here, count = operators[start:stop], arity[start:stop]
        below = slice(levels[level + 1], levels[level + 2])
        first = np.cumsum(count) - count
        size[here] = 2 + np.add.reduceat(size[below], first)
        value[here] = _apply(token[here], value[below], first, count)
        stop = start
    return size, value


def _apply(operator: Tokens, arguments: Indices, first: Indices, arity: Indices) -> Indices:
    """Values of operators, ``(p,)``; those of one have their arguments from ``first`` on."""
    width = int(arity.max(initial=1))
    table = np.full((len(arity), width), 10, np.uint8)  # (p, width): 10 sorts behind every digit
    table[np.arange(width) < arity[:, None]] = arguments
    table.sort(axis=1)
    row = np.arange(len(arity))
    median = (table[row, (arity - 1) // 2] + table[row, arity // 2]) // 2
    total = np.add.reduceat(arguments, first) % 10
    return np.choose(operator - MIN, [table[:, 0], table[row, arity - 1], median, total])


def _lay_out(forest: _Forest, size: Indices, roots_at: Indices, order: Indices) -> Tokens:
    """Tokens, ``(total,)``, of a forest whose siblings stand in ``order``, from the roots down.

    ``order`` is a permutation of the nodes that moves them among their siblings only.
    """
    token, arity, levels = forest
    operators = np.flatnonzero(token >= MIN)
    roots = len(roots_at)
    parent = np.repeat(operators, arity)  # (nodes - roots,)
    before = np.cumsum(size[order]) - size[order]
    first = roots + np.cumsum(arity) - arity
    within = np.empty_like(size)  # tokens between the parent's operator and this node
    within[order[roots:]] = (before[roots:] - np.repeat(before[first], arity)) + 1
    at = np.empty_like(size)
    at[:roots] = roots_at
    for start, stop in itertools.pairwise(levels[1:]):
        at[start:stop] = at[parent[start - roots : stop - roots]] + within[start:stop]
    tokens = np.empty(int(size[:roots].sum()), np.uint8)
    tokens[at] = token
    tokens[at[operators] + size[operators] - 1] = CLOSE
    return tokens


def shuffle_operands(tokens: Tokens, offsets: Indices, rng: np.random.Generator) -> Tokens:
    """Permute the arguments of every operator; every label holds, for the operators are symmetric.

    O(total · log total), about 6 ms for 64 samples of 1000 tokens.

    Args:
        tokens: Complete expressions, one after another, ``(total,)``.
        offsets: Where each begins, and at last the total, ``(b + 1,)``.
        rng: Each argument draws a number; they are sorted by it.

    Returns:
        ``(total,)``, each sample with its own length and multiset of tokens.
    """
    forest, _ = _plant(tokens)
    size, _ = _sizes_and_values(forest)
    roots = len(offsets) - 1
    family = np.repeat(np.arange(len(forest.arity), dtype=np.uint64), forest.arity)
    draw = rng.integers(1 << 32, size=len(family), dtype=np.uint64)
    order = np.argsort(family << np.uint64(32) | draw)
    order = np.concatenate([np.arange(roots), roots + order])
    return _lay_out(forest, size, offsets[:-1], order)


def to_text(tokens: Tokens) -> str:
    """The public text of one sample, ``(n,)``, with its parentheses: 3n - 2 words.

    An operator with its arguments is a left-nested chain: ``( ( ( [MAX 2 ) 3 ) ] )``.
    """
    return next(_texts(tokens, np.array([0, len(tokens)])))


def _texts(tokens: Tokens, offsets: Indices) -> Iterator[str]:
    forest, at = _plant(tokens)
    width = int(forest.arity.max(initial=0)) + 1
    names = VOCABULARY.tokens
    pieces = [f"{name} )" for name in names[:CLOSE]] + ["] ) )"]
    pieces += ["( " * (n + 1) + name for name in _OPERATORS for n in range(width)]
    code = tokens.astype(np.int64)
    operator = forest.token >= MIN
    kind = forest.token[operator].astype(np.int64) - MIN
    code[at[operator]] = len(names) + kind * width + forest.arity
    for start, stop in itertools.pairwise(offsets.tolist()):
        # Every piece ends an argument; the root is none.
        yield " ".join(map(pieces.__getitem__, code[start:stop].tolist()))[:-2]


def from_text(text: str) -> Tokens:
    """The tokens, ``(n,)``, of a text with or without parentheses; n counts no parentheses."""
    line = text.encode()
    try:
        ids = bytes(map(_IDS.__getitem__, line.translate(None, b"()").split()))
    except KeyError as error:
        word = error.args[0].decode()[:60]
        raise ValueError(f"unknown token {word!r}, expected 0-9, [MIN [MAX [MED [SM ]") from None
    tokens = np.frombuffer(ids, np.uint8)
    if len(tokens) == 0:
        raise ValueError("the expression is empty, expected at least one token")
    rise = _RISE[tokens]
    depth = np.cumsum(rise, dtype=np.int64)
    bare = (rise[:-1] > 0) & (rise[1:] < 0)
    if depth[-1] != 0 or (depth[:-1] <= 0).any() or bare.any():
        raise ValueError(
            f"the expression is not one complete tree: {np.sum(rise < 0)} ] for {np.sum(rise > 0)} "
            f"operators, {np.sum(bare)} of them without arguments, or more after the end"
        )
    opened, closed = line.count(b"("), line.count(b")")
    if opened != closed or opened not in (0, len(tokens) - 1):
        raise ValueError(
            f"parentheses must be absent, or {len(tokens) - 1} pairs for {len(tokens)} tokens; "
            f"got {opened} ( and {closed} )"
        )
    return tokens


def find(data_dir: str | os.PathLike[str]) -> Path:
    """The directory with ``basic_{train,val,test}.tsv``, at or under ``data_dir``."""
    return files.locate(data_dir, "listops-1000", list(FILES.values()))


def load(data_dir: str | os.PathLike[str], protocol: str | None = None) -> Data:
    """Read ``basic_{train,val,test}.tsv`` from ``data_dir``, or from a release at or under it.

    Every protocol reads the same lists. A file that is damaged in any way raises a ValueError with
    its name and the line.
    """
    folder = find(data_dir)
    splits = {name: files.read_table(folder / file, _HEADER, _row) for name, file in FILES.items()}
    longest = max(int(split.lengths.max()) for split in splits.values())
    return files.describe(splits, folder, protocol_of(protocol), max_length=longest)


def _row(columns: list[str]) -> tuple[Tokens, int]:
    source, target = columns
    if target not in set("0123456789"):
        raise ValueError(f"the label must be 0 to 9, got {target[:60]!r}")
    return from_text(source), int(target)


def generate(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    num_train: int = 96_000,
    num_val: int = 2_000,
    num_test: int = 2_000,
    min_length: int = 501,
    max_length: int = 1999,
    workers: int | None = None,
) -> None:
    """Write the three public files under ``out``, and ``generated.json``, which says from what.

    The test set comes first in the stream of samples, so it does not depend on ``num_train``.
    100,000 samples take 12 s on two cores, writing included.
    """
    sizes = {"test": num_test, "val": num_val, "train": num_train}
    files.sizes((num_train, num_val, num_test), (1, 1, 1), seed=seed)
    files.check_empty(Path(out))
    bounds = {"min_length": min_length, "max_length": max_length}
    drawn = generate_split(sum(sizes.values()), seed=seed, **bounds, workers=workers)
    cuts = itertools.pairwise(itertools.accumulate(sizes.values(), initial=0))
    splits = {name: drawn.slice(*cut) for name, cut in zip(sizes, cuts, strict=True)}
    record = {
        "task": "listops",
        "seed": seed,
        **bounds,
        "vocabulary": VOCABULARY.hash,
        "samples": sizes,
        "fingerprints": {name: split.fingerprint() for name, split in splits.items()},
    }
    files.write_files(
        Path(out), {FILES[name]: _lines(split) for name, split in splits.items()}, record
    )


def _lines(split: Split) -> Iterator[bytes]:
    yield "\t".join(_HEADER).encode() + b"\n"
    with files.progress("write listops", len(split)) as advance:
        for start in range(0, len(split), 256):
            part = split.slice(start, start + 256)
            texts = _texts(part.tokens, part.offsets)
            rows = (f"{text}\t{label}\n" for text, label in zip(texts, part.labels, strict=True))
            yield "".join(rows).encode()
            advance(len(part))


def generate_split(
    num: int,
    *,
    seed: int = 0,
    min_length: int = 501,
    max_length: int = 1999,
    workers: int | None = None,
) -> Split:
    """Draw ``num`` distinct samples whose number of tokens is in [min_length, max_length].

    The samples of a seed are one fixed sequence, of which this is the beginning: the same bytes
    for any number of workers, numpy version and machine.

    Args:
        num: How many.
        seed: Any integer that is not negative.
        min_length, max_length: Bounds of n, both included.
        workers: Processes; None means one a core. One block is drawn here before any starts.
    """
    if seed < 0 or num < 0:
        raise ValueError(f"seed and num must not be negative, got seed {seed} and num {num}")
    if max_length < max(min_length, 4):
        raise ValueError(
            f"max_length must be at least min_length and at least 4, the shortest list; "
            f"got min_length {min_length} and max_length {max_length}"
        )
    samples: list[Tokens] = []
    labels: list[int] = []
    seen: set[bytes] = set()
    barren = 0
    draw = partial(_block, seed=seed, low=min_length, high=max_length)
    with (
        closing(files.in_order(draw, workers)) as blocks,
        files.progress("draw listops", num) as advance,
    ):
        while len(samples) < num:
            block, before = next(blocks), len(samples)
            for i, label in enumerate(block.labels.tolist()):
                digest = hashlib.blake2b(block.sample(i).data, digest_size=16).digest()
                if digest not in seen and len(samples) < num:
                    seen.add(digest)
                    samples.append(block.sample(i))
                    labels.append(label)
            advance(len(samples) - before)
            barren = 0 if len(samples) > before else barren + 1
            if barren == _BARREN:
                raise ValueError(
                    f"min_length {min_length} and max_length {max_length} leave too few samples: "
                    f"{before} of {num} found, and no new one in the last {_BARREN * _BLOCK} "
                    "trees; widen the range or ask for fewer"
                )
    return Split.of(samples, labels)


def _block(number: int, *, seed: int, low: int, high: int) -> Split:
    """The trees of one block that have ``low`` to ``high`` tokens."""
    forest, lengths = _grow(number, seed, low, high)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    size, value = _sizes_and_values(forest)
    tokens = _lay_out(forest, size, offsets[:-1], np.arange(len(size)))
    return Split(tokens, offsets, value[: len(lengths)])


def _grow(number: int, seed: int, low: int, high: int) -> tuple[_Forest, Indices]:
    """Draw a block of trees and keep those of ``low`` to ``high`` tokens; also their lengths.

    One raw 64-bit word decides a node: an operator with probability 1/4 (never on the last level)
    with a uniform kind and 2 to 10 arguments, else a uniform digit. Raw words, because numpy
    promises that the stream of a BitGenerator stays, but not that of a Generator's methods.
    """
    bits = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=(number,)))
    tree = np.arange(_BLOCK)
    lengths = np.ones(_BLOCK, np.int64)
    grown: list[tuple[Tokens, Indices, Indices]] = []
    for level in range(_DEPTH):
        word = bits.random_raw(len(tree))
        kind = word >> np.uint64(2) & np.uint64(3)
        uniform = word >> np.uint64(32)
        operator = (word & np.uint64(3) == 0) & (level < _DEPTH - 1)
        digit = uniform * np.uint64(10) >> np.uint64(32)
        token = np.where(operator, kind + np.uint64(MIN), digit + np.uint64(ZERO)).astype(np.uint8)
        arity = (uniform[operator] * np.uint64(9) >> np.uint64(32)).astype(np.int64) + 2
        grown.append((token, arity, tree))
        parents = tree[operator]
        # A new operator adds its bracket, and the first token of each argument.
        lengths += np.bincount(parents, 1 + arity, _BLOCK).astype(np.int64)
        alive = lengths[parents] <= high  # a tree that is too long is not grown any further
        tree = np.repeat(parents[alive], arity[alive])
        if len(tree) == 0:
            break
    kept = (low <= lengths) & (lengths <= high)
    tokens, arities, levels = [], [], [0]
    for token, arity, tree in grown:
        stays = kept[tree]
        tokens.append(token[stays])
        arities.append(arity[stays[token >= MIN]])
        levels.append(levels[-1] + len(tokens[-1]))
    return _Forest(np.concatenate(tokens), np.concatenate(arities), levels), lengths[kept]


@dataclass(frozen=True)
class ListOps:
    """ListOps as a ``Task``; its augmentation shuffles the arguments of every operator."""

    name: str = "listops"
    vocabulary: Vocabulary = VOCABULARY
    num_classes: int = 10
    parts: int = 1

    generate = staticmethod(generate)
    generate_split = staticmethod(generate_split)
    find = staticmethod(find)
    load = staticmethod(load)
    augment = staticmethod(shuffle_operands)

    def floors(self, split: Split) -> dict[str, float]:
        """Accuracy of the best constant label, and of the best label for each root operator."""
        from fastattn.lra.analysis import listops_floors  # analysis reads this file's vocabulary

        return listops_floors(split)

    def chance(self, split: Split) -> dict[str, float]:
        """Cross-entropies, in nats, that need no input, or no more of it than the first token."""
        from fastattn.lra.analysis import chance_losses, root_loss

        return chance_losses(split, self.num_classes) | {"the root operator": root_loss(split)}

    def breakdown(self, split: Split, predictions: ArrayLike) -> dict[str, Any]:
        """Accuracy for each root operator, for the result of a test."""
        from fastattn.lra.analysis import accuracy_by_root

        return {"by_root_operator": accuracy_by_root(split, predictions)}


LISTOPS = ListOps()
