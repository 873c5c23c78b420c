"""ListOps: the generator against the published figures, the files against every kind of damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import permutations
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

import fastattn
from fastattn.lra.analysis import accuracy_by_root, listops_floors
from fastattn.lra.data import Split, Task
from fastattn.lra.tasks import TASKS
from fastattn.lra.tasks import listops as task
from fastattn.lra.tasks.listops import LISTOPS, evaluate, from_text, generate_split, to_text

MIN, MAX, MED, SM, CLOSE = range(15, 20)
FILES = task.FILES
TABLE = 6000  # samples behind the figures of the public generator
NESTED = "( ( ( [MAX 2 ) ( ( ( ( [MIN 7 ) 9 ) 8 ) ] ) ) ] )"
CHAIN = "[SM 1 " * 700 + "2 " + "] " * 700


@pytest.fixture(scope="module")
def drawn() -> Split:
    return generate_split(6000, seed=0, workers=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("listops")
    LISTOPS.generate(out, num_train=60, num_val=20, num_test=20, workers=1)
    return out


@pytest.fixture
def damaged(tmp_path, files):
    """Write the three files with another training file, and return their directory."""

    def write(train: bytes) -> Path:
        for name in FILES.values():
            (tmp_path / name).write_bytes((files / name).read_bytes())
        (tmp_path / FILES["train"]).write_bytes(train)
        return tmp_path

    return write


def split_of(*texts: str) -> Split:
    samples = [from_text(text) for text in texts]
    return Split.of(samples, [evaluate(sample) for sample in samples])


def tree(tokens) -> tuple:
    """The expression as nested tuples whose arguments are sorted: equal up to their order."""
    stack: list[list] = [[]]
    for token in tokens.tolist():
        if MIN <= token < CLOSE:
            stack.append([token])
        elif token == CLOSE:
            operator, *arguments = stack.pop()
            stack[-1].append((operator, *sorted(arguments, key=repr)))
        else:
            stack[-1].append(token)
    return stack[0][0]


def assert_share(share: float, n: int, table: str, table_n: int = TABLE) -> None:
    """Within four standard errors of a share that was itself estimated, and rounded as written."""
    expected, rounding = float(table), 0.5 * 10.0 ** -len(table.partition(".")[2])
    error = sqrt(expected * (1 - expected) * (1 / n + 1 / table_n))
    assert abs(share - expected) <= 4 * error + rounding, f"{share:.4f}, table {table}"


def roots(split: Split) -> np.ndarray:
    return split.tokens[split.offsets[:-1]]


def test_listops_is_a_task_with_fixed_ids():
    assert isinstance(TASKS["listops"], Task)
    assert LISTOPS.num_classes == 10
    words = ["<pad>", "0", "9", "[MIN", "[MAX", "[MED", "[SM", "]"]
    assert LISTOPS.vocabulary.encode(words).tolist() == [0, 5, 14, 15, 16, 17, 18, 19]
    assert LISTOPS.vocabulary.hash == "2d763250f8469760"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 2 9 ]", 9),
        ("[MED 4 2 9 ]", 4),
        ("[MED 4 9 2 7 ]", 5),  # the mean of 4 and 7, cut off
        ("[SM 4 2 9 ]", 5),
        (NESTED, 7),
        (CHAIN, 2),  # 700 + 2 modulo 10, deeper than any recursion
    ],
)
def test_value(text, value):
    assert evaluate(from_text(text)) == value


def test_parentheses_do_not_count_and_no_tail_is_lost():
    """A list of 1500 tokens has 4498 words in the public text; cut at 2000, it has no end."""
    drawn = generate_split(1, min_length=1500, max_length=1500, workers=1).sample(0)
    text = to_text(drawn)
    assert len(text.split()) == 3 * 1500 - 2
    assert len(from_text(text)) == 1500
    assert from_text(text)[-1] == CLOSE


def test_labels_are_what_the_stack_machine_says(drawn):
    assert [evaluate(drawn.sample(i)) for i in range(1000)] == drawn.labels[:1000].tolist()
    short = generate_split(3000, seed=1, min_length=1, max_length=60, workers=1)
    assert [evaluate(short.sample(i)) for i in range(3000)] == short.labels.tolist()


def test_one_tree_in_twelve_is_kept():
    blocks = [task._block(number, seed=0, low=501, high=1999) for number in range(9)]
    trees = 9 * task._BLOCK
    assert_share(sum(map(len, blocks)) / trees, trees, "0.082", round(TABLE / 0.082))


def test_lengths_are_those_of_the_public_generator(drawn):
    lengths = drawn.lengths
    assert lengths.min() >= 501
    assert lengths.max() <= 1999
    error = lengths.std() * sqrt(1 / len(drawn) + 1 / TABLE)
    assert abs(lengths.mean() - 1041) <= 4 * error + 0.5
    for share, quartile in (("0.250", 708), ("0.500", 961), ("0.750", 1319)):
        assert_share(np.mean(lengths <= quartile), len(drawn), share)


def test_operators_are_those_of_the_public_generator(drawn):
    for operator in (MIN, MAX, MED, SM):
        assert_share(np.mean(roots(drawn) == operator), len(drawn), "0.2500")
    arity = np.array([len(tree(drawn.sample(i))) - 1 for i in range(2000)])
    assert abs(arity.mean() - 6.9) <= 4 * arity.std() * sqrt(1 / 2000 + 1 / TABLE) + 0.05
    assert arity.max() == 10
    inside = (drawn.tokens >= MIN) & (drawn.tokens < CLOSE)
    operators = np.add.reduceat(inside, drawn.offsets[:-1], dtype=np.int64)
    residual = operators - 0.142 * drawn.lengths
    error = residual.std() / drawn.lengths.mean() * sqrt(1 / len(drawn) + 1 / TABLE)
    assert abs(operators.sum() / drawn.lengths.sum() - 0.142) <= 4 * error + 0.0005


def test_every_list_is_ten_levels_deep(drawn):
    step = np.zeros(20, np.int64)
    step[MIN:CLOSE], step[CLOSE] = 1, -1
    depth = np.cumsum(step[drawn.tokens])
    assert set(np.maximum.reduceat(depth, drawn.offsets[:-1]).tolist()) == {9}


def test_labels_are_those_of_the_public_generator(drawn):
    table = "0.169 0.088 0.072 0.078 0.092 0.091 0.082 0.071 0.088 0.170"
    for label, share in enumerate(table.split()):
        assert_share(np.mean(drawn.labels == label), len(drawn), share)
    given_root = {
        MIN: {0: "0.575", 1: "0.21"},
        MAX: {9: "0.553", 8: "0.219"},
        MED: {4: "0.223", 5: "0.213"},
        SM: dict.fromkeys(range(10), "0.1000"),
    }
    for root, shares in given_root.items():
        labels = drawn.labels[roots(drawn) == root]
        for label, share in shares.items():
            assert_share(np.mean(labels == label), len(labels), share, TABLE // 4)


def test_floors_are_those_of_the_public_data(drawn):
    floors = LISTOPS.floors(drawn)
    assert_share(floors["majority"], len(drawn), "0.170")
    assert_share(floors["root_operator"], len(drawn), "0.3675")


def test_floors_count_the_best_guess():
    split = split_of("[MAX 9 1 ]", "[MAX 9 2 ]", "[MAX 3 1 ]", "[MIN 9 3 ]", "[MIN 3 4 ]")
    assert listops_floors(split) == {"majority": 3 / 5, "root_operator": 4 / 5}


def test_accuracy_is_split_by_the_root():
    split = split_of("[MAX 9 1 ]", "[MAX 9 2 ]", "[MAX 3 1 ]", "[MIN 9 3 ]")
    assert accuracy_by_root(split, [9, 0, 3, 1]) == {
        "[MIN": {"samples": 1, "accuracy": 0.0, "floor": 1.0},
        "[MAX": {"samples": 3, "accuracy": 2 / 3, "floor": 2 / 3},
    }
    with pytest.raises(ValueError, match=r"\(N,\) with N = 4 samples, got shape \(3,\)"):
        accuracy_by_root(split, [9, 0, 3])


def test_a_seed_means_these_bytes():
    assert generate_split(100, seed=0).fingerprint() == "d56d61cc207accc7"
    assert generate_split(100, seed=1).fingerprint() != generate_split(100).fingerprint()


def test_workers_do_not_change_a_byte():
    alone = generate_split(2500, seed=3, workers=1)
    assert len(alone) > 2 * len(task._block(0, seed=3, low=501, high=1999))
    assert generate_split(2500, seed=3, workers=2).fingerprint() == alone.fingerprint()


def test_the_hash_seed_does_not_change_a_byte():
    program = (
        "from fastattn.lra.tasks.listops import LISTOPS, generate_split;"
        "print(LISTOPS.vocabulary.hash, generate_split(50, workers=1).fingerprint())"
    )
    source = str(Path(fastattn.__file__).parents[1])
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{LISTOPS.vocabulary.hash} {generate_split(50, workers=1).fingerprint()}\n"}


def test_no_sample_comes_twice():
    """There are exactly 400 lists of four tokens, so all of them must come."""
    split = generate_split(400, min_length=4, max_length=4, workers=1)
    assert len({split.sample(i).tobytes() for i in range(400)}) == 400
    with pytest.raises(ValueError, match="too few samples: 400 of 401 found"):
        generate_split(401, min_length=4, max_length=4, workers=1)


def test_a_longer_draw_begins_with_the_shorter(drawn):
    assert generate_split(300, workers=1).fingerprint() == drawn.take(300).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_length": 10, "max_length": 9}, "min_length 10 and max_length 9"),
        ({"min_length": 1, "max_length": 3}, "at least 4"),
        ({"min_length": 90_000, "max_length": 90_001}, "0 of 5 found"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_an_impossible_request_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_split(5, workers=1, **arguments)
    with pytest.raises(ValueError, match="num_val must be at least 1, got 0"):
        LISTOPS.generate("unused", num_val=0)


def test_more_training_samples_leave_test_and_val_alone(tmp_path, files):
    LISTOPS.generate(tmp_path, num_train=90, num_val=20, num_test=20, workers=1)
    for name in ("test", "val"):
        assert (tmp_path / FILES[name]).read_bytes() == (files / FILES[name]).read_bytes()
    assert len(LISTOPS.load(tmp_path)["train"]) == 90


def test_files_read_back_as_they_were_drawn(files):
    record = json.loads((files / "generated.json").read_text())
    splits = LISTOPS.load(files)
    drawn = generate_split(100, workers=1)
    assert record["samples"] == {"test": 20, "val": 20, "train": 60}
    assert {name: split.fingerprint() for name, split in splits.items()} == record["fingerprints"]
    assert splits["test"].fingerprint() == drawn.take(20).fingerprint()
    assert splits["train"].fingerprint() == drawn.slice(40, 100).fingerprint()
    assert (record["seed"], record["vocabulary"]) == (0, LISTOPS.vocabulary.hash)
    assert sorted(os.listdir(files)) == [*sorted(FILES.values()), "generated.json"]


def test_files_have_the_public_form(files):
    rows = (files / FILES["val"]).read_bytes().decode().split("\n")
    assert rows[0] == "Source\tTarget"
    assert rows[-1] == ""
    split = LISTOPS.load(files)["val"]
    for i, row in enumerate(rows[1:-1]):
        source, target = row.split("\t")
        n = len(split.sample(i))
        assert len(source.split(" ")) == 3 * n - 2
        assert split.sample(i)[-1] == CLOSE
        assert int(target) == split.labels[i] == evaluate(split.sample(i))


@pytest.mark.parametrize("text", ["7", "( ( ( [MAX 2 ) 3 ) ] )", NESTED])
def test_text_is_the_left_nested_chain(text):
    assert to_text(from_text(text)) == text
    bare = text.replace("( ", "").replace(" )", "")
    assert from_text(bare).tolist() == from_text(text).tolist()


def test_brackets_and_operators_are_kept():
    assert from_text("( ( ( [MAX 2 ) 3 ) ] )").tolist() == [MAX, 7, 8, CLOSE]
    every = from_text("[MIN 1 [MAX 2 [MED 3 [SM 4 5 ] ] ] ]").tolist()
    assert sorted(set(every) - set(range(5, 15))) == [MIN, MAX, MED, SM, CLOSE]


@pytest.mark.parametrize(
    "folder",
    [".", "listops-1000", "lra_release/listops-1000", "lra_release/lra_release/listops-1000"],
)
def test_files_are_found_at_every_public_depth(tmp_path, files, folder):
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    for name in FILES.values():
        (place / name).write_bytes((files / name).read_bytes())
    assert LISTOPS.load(tmp_path)["val"].fingerprint() == LISTOPS.load(files)["val"].fingerprint()


def test_a_missing_file_is_named(tmp_path, files):
    with pytest.raises(ValueError, match=r"basic_train.tsv.*basic_test.tsv; none.*lra_release"):
        LISTOPS.load(tmp_path)
    (tmp_path / FILES["val"]).write_bytes((files / FILES["val"]).read_bytes())
    with pytest.raises(ValueError, match=r"has basic_val.tsv but lacks basic_train.tsv, basic_tes"):
        LISTOPS.load(tmp_path)


GOOD = b"Source\tTarget\n( ( ( [MAX 2 ) 3 ) ] )\t3\n[MIN 2 3 ]\t2\n"


@pytest.mark.parametrize("train", [GOOD, GOOD.replace(b"\n", b"\r\n"), GOOD[:-1]])
def test_either_line_end_and_none_at_the_end_are_read(damaged, train):
    split = LISTOPS.load(damaged(train))["train"]
    assert split.labels.tolist() == [3, 2]
    assert split.tokens.tolist() == [MAX, 7, 8, CLOSE, MIN, 7, 8, CLOSE]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (b"", "line 1: the file ends before its first sample"),
        (b"Source\tTarget\n", "line 2: the file ends before its first sample"),
        (b"Source\tLabel\n2\t2\n", r"line 1: expected the columns .*Target.*Label"),
        (b"[MAX 2 3 ]\t3\n", "line 1: expected the columns"),
        (GOOD + b"[MAX 2 3 ]\n", "line 4: expected 2 columns, got 1"),
        (GOOD + b"[MAX 2 3 ]\t3\t3\n", "line 4: expected 2 columns, got 3"),
        (GOOD + b"\n" + GOOD, "line 4: expected 2 columns, got 1"),
        (GOOD + b"[MAX 2 3 X\t3\n", "line 4: unknown token 'X'"),
        (GOOD + b"[MAX 2 <pad> ]\t3\n", "line 4: unknown token '<pad>'"),
        (GOOD + b"[MAX 2 23 ]\t3\n", "line 4: unknown token '23'"),
        (GOOD + b"[MAX 2 3 ]\t10\n", "line 4: the label must be 0 to 9, got '10'"),
        (GOOD + b"2\t\n", "line 4: the label must be 0 to 9, got ''"),
        (GOOD + "[MAX 2 3 ]\t\u0663\n".encode(), "line 4: the label must be 0 to 9"),
        (GOOD + b"[MAX 2 [MIN 3 4 ]\t3\n", "line 4: .*not one complete tree: 1 ] for 2"),
        (GOOD + b"[MAX 2 3 ] ]\t3\n", "line 4: .*not one complete tree: 2 ] for 1"),
        (GOOD + b"2 ] [MAX 3\t3\n", "line 4: .*not one complete tree"),
        (GOOD + b"2 3\t3\n", "line 4: .*not one complete tree"),
        (GOOD + b"[MAX 2 [MIN ] ]\t3\n", "line 4: .*1 of them without arguments"),
        (GOOD + b"( ( [MAX 2 ) ]\t2\n", "line 4: parentheses must be absent, or 2 pairs"),
        (GOOD + b"\t3\n", "line 4: the expression is empty"),
        (GOOD + b"( )\t3\n", "line 4: the expression is empty"),
        (GOOD + b"[MAX \xff ]\t3\n", "line 4: .*codec"),
        (GOOD[:-6], "line 3: expected 2 columns, got 1"),  # cut off by a full disk
    ],
)
def test_damage_is_reported_with_file_and_line(damaged, train, message):
    with pytest.raises(ValueError, match=r"basic_train\.tsv, " + message):
        LISTOPS.load(damaged(train))


def test_a_killed_run_leaves_no_file_that_looks_whole(tmp_path, monkeypatch):
    written = []

    def killed_on_the_last_file(tokens, offsets):
        written.append(["2"] * (len(offsets) - 1))
        if len(written) == 3:
            raise KeyboardInterrupt
        return written[-1]

    monkeypatch.setattr(task, "_texts", killed_on_the_last_file)
    with pytest.raises(KeyboardInterrupt):
        LISTOPS.generate(tmp_path, num_train=9, num_val=3, num_test=3, workers=1)
    assert not list(tmp_path.iterdir())


def test_shuffling_moves_siblings_only_and_keeps_the_label(drawn):
    batch = drawn.take(200)
    tokens = LISTOPS.augment(batch.tokens, batch.offsets, np.random.default_rng(0))
    shuffled = Split(tokens, batch.offsets, batch.labels)
    for i in range(len(batch)):
        before, after = batch.sample(i), shuffled.sample(i)
        assert before.tolist() != after.tolist()
        assert sorted(before.tolist()) == sorted(after.tolist())
        assert tree(before) == tree(after)
        assert evaluate(after) == batch.labels[i]


def test_shuffling_reaches_every_order_equally():
    rounds = 6000
    batch = split_of(*["[MAX 1 2 3 ]"] * rounds)
    tokens = LISTOPS.augment(batch.tokens, batch.offsets, np.random.default_rng(0))
    seen = [tuple(row) for row in tokens.reshape(rounds, 5)[:, 1:4].tolist()]
    error = sqrt(1 / 6 * 5 / 6 / rounds)
    assert all(abs(seen.count(x) / rounds - 1 / 6) <= 4 * error for x in permutations([6, 7, 8]))


def test_shuffling_takes_any_tree_a_file_may_hold():
    batch = split_of("4", "[MED " + "1 2 3 " * 300 + "]", CHAIN, "[SM 5 ]")
    tokens = LISTOPS.augment(batch.tokens, batch.offsets, np.random.default_rng(0))
    shuffled = Split(tokens, batch.offsets, batch.labels)
    assert [evaluate(shuffled.sample(i)) for i in range(4)] == batch.labels.tolist()
    assert (tokens != batch.tokens).any()
    for i in range(4):
        assert sorted(shuffled.sample(i).tolist()) == sorted(batch.sample(i).tolist())
        assert from_text(to_text(batch.sample(i))).tolist() == batch.sample(i).tolist()


def test_100_000_samples_take_less_than_two_minutes(tmp_path):
    """A tenth of them in a tenth of the time, files included."""
    start = time.monotonic()
    sizes = {"num_train": 9000, "num_val": 500, "num_test": 500}
    TASKS["listops"].generate(tmp_path, **sizes, workers=2)
    assert time.monotonic() - start < 12
