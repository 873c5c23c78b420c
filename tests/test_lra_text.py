"""Text: every layout of IMDB gives the same splits, and a stand-in says that it is one."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from fastattn.lra.analysis import shared
from fastattn.lra.tasks import mails, stand_in_texts
from fastattn.lra.tasks.text import TEXT

REVIEWS = [
    (f'Review {i}: "quoted", tab\there,\nline, émoji \U0001f600 ' + "word " * (i * 40 % 900), i % 2)
    for i in range(60)
]


def write_folder(root, train=REVIEWS[:40], test=REVIEWS[40:]):
    for name, reviews in (("train", train), ("test", test)):
        for c in ("neg", "pos", "unsup"):
            (root / name / c).mkdir(parents=True, exist_ok=True)
        (root / name / "unsup" / "0_0.txt").write_text("without a label")
        for i, (text, label) in enumerate(reviews):
            (root / name / ("neg", "pos")[label] / f"{i}_7.txt").write_bytes(text.encode())
    return root


def fingerprints(data):
    return {name: split.fingerprint() for name, split in data.items()}


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "aclImdb")
    return tmp_path


def test_the_public_folder_is_read_by_bytes(folder):
    data = TEXT.load(folder)
    assert {name: len(split) for name, split in data.items()} == {"train": 36, "val": 4, "test": 20}
    known = {text.encode()[:4096]: label for text, label in REVIEWS}
    for split in data.values():
        for i in range(len(split)):
            assert known[bytes(split.sample(i))] == split.labels[i]
    assert fingerprints(TEXT.load(folder / "aclImdb")) == fingerprints(data)
    assert data.record["max_length"] == 4096
    assert not data.record["generated"]
    assert data.record["stand_in"] is None


def test_an_emoji_is_four_bytes_and_no_id_is_unknown(folder):
    data = TEXT.load(folder)
    assert "\U0001f600" in bytes(data["test"].sample(0)).decode(errors="ignore")
    assert len(TEXT.vocabulary) == 256
    assert TEXT.vocabulary.hash == "be5d4eab94b3b284"


@pytest.mark.parametrize("columns", [("text", "label"), ("label", "text"), ("review", "sentiment")])
def test_a_table_gives_the_splits_of_the_folder(folder, tmp_path, columns):
    out = tmp_path / "table"
    out.mkdir()
    names = ("negative", "positive") if "sentiment" in columns else (0, 1)
    for name, reviews in (("train", REVIEWS[:40]), ("test", REVIEWS[40:])):
        with open(out / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for text, label in reviews:
                by_kind = {"label": names[label], "sentiment": names[label]}
                writer.writerow({c: by_kind.get(c, text) for c in columns})
    assert fingerprints(TEXT.load(out)) == fingerprints(TEXT.load(folder))


def test_a_quote_in_a_tsv_is_a_letter(tmp_path):
    rows = "label\ttext\n" + "".join(f'{i % 2}\t"lone quote {i}\n' for i in range(8))
    for name in ("train", "test"):
        (tmp_path / f"{name}.tsv").write_text(rows)
    data = TEXT.load(tmp_path)
    assert len(data["test"]) == 8
    assert all(bytes(data["test"].sample(i)).startswith(b'"lone quote') for i in range(8))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("id,words\n1,a\n", "expected the columns text and label, got"),
        ("label,text\n2,a\n", "line 2: the label must be 0 or 1, neg or pos, got '2'"),
        ("label,text\n1,a\n0,b,c\n", "line 3: expected 2 columns, got 3"),
        ("label,text\n1,a\n1,b\n", "train has 2 samples of class 1 and none of another"),
        ('label,text\n1,a\n0,"b', "line 3: unexpected end of data"),
    ],
)
def test_a_damaged_table_is_one_sentence_with_the_line(tmp_path, train, message):
    (tmp_path / "train.csv").write_text(train)
    (tmp_path / "test.csv").write_text("label,text\n1,a\n0,b\n")
    with pytest.raises(ValueError, match=message):
        TEXT.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("IMDB Dataset.csv", "review,sentiment"),
        ("reviews.csv", '"Sentence","Label"'),
        ("imdb.tsv", "label\ttext"),
    ],
)
def test_one_table_of_all_reviews_is_named_and_refused(tmp_path, name, header):
    (tmp_path / "a.csv").write_text("id,price\n1,2\n")
    (tmp_path / name).write_text(f"{header}\nfine,positive\nbad,negative\n")
    with pytest.raises(ValueError, match=rf"{name} is one table of reviews, .*fetch aclImdb"):
        TEXT.load(tmp_path)


def test_missing_folders_are_named(tmp_path, folder):
    with pytest.raises(ValueError, match=r"train/pos.*train\.csv and test\.csv"):
        TEXT.load(tmp_path / "aclImdb" / "train" / "unsup")
    for path in (folder / "aclImdb/test/neg").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="test has 10 samples of class 1 and none of another"):
        TEXT.load(folder)
    (folder / "aclImdb/test/neg").rmdir()
    with pytest.raises(ValueError, match="holds reviews but lacks test/neg"):
        TEXT.load(folder)


def test_counts_other_than_the_public_ones_are_noted(folder):
    (note,) = TEXT.load(folder).record["notes"]
    assert "train has [20, 20], not [12500, 12500]; test has [10, 10]" in note


def test_validation_depends_on_the_reviews_only_and_equal_ones_stay_together(tmp_path):
    twice = REVIEWS[:20] * 2
    one = TEXT.load(write_folder(tmp_path / "one", train=twice))
    other = TEXT.load(write_folder(tmp_path / "other", train=twice[::-1]))
    assert fingerprints(one) == fingerprints(other)
    assert shared(one["train"], one["val"]) == 0
    assert shared(one["train"], one["train"]) == len(one["train"])


def test_lra2020_validates_on_the_test_set_and_says_so(folder):
    with pytest.warns(UserWarning, match="lra2020 validates Text on its test set"):
        data = TEXT.load(folder, "lra2020")
    assert data["val"].fingerprint() == data["test"].fingerprint()
    assert (len(data["train"]), data["train"].lengths.max()) == (40, 1000)
    assert data.record["protocol"] == "lra2020"
    assert data.record["validation"] == "the test set"


def test_the_default_selects_nothing_on_the_test_set(folder):
    data = TEXT.load(folder)
    assert shared(data["test"], data["val"]) == 0
    assert data.record["validation"] == "part of train, by content"
    assert TEXT.load(folder, "mega")["train"].lengths.max() <= 4000


# Stand-ins


def test_a_stand_in_is_the_seed_and_says_what_it_is(tmp_path):
    sizes = {"num_train": 30, "num_val": 6, "num_test": 12}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        TEXT.generate(tmp_path / name, seed=seed, **sizes)
    a, b, c = (TEXT.load(tmp_path / name) for name in "abc")
    assert fingerprints(a) == fingerprints(b) != fingerprints(c)
    files = {p.relative_to(tmp_path / "a"): p.read_bytes() for p in (tmp_path / "a").rglob("*.txt")}
    assert files == {
        p.relative_to(tmp_path / "b"): p.read_bytes() for p in (tmp_path / "b").rglob("*.txt")
    }
    assert [len(a[name]) for name in ("train", "val", "test")] == [30, 6, 12]
    assert "planted words" in a.record["stand_in"]
    assert min(split.lengths.min() for split in a.values()) >= 1000
    assert max(split.lengths.max() for split in a.values()) <= 4096


def test_the_label_is_the_majority_of_planted_words_and_no_one_word_gives_it_away():
    kinds = [set(words) for words in stand_in_texts._PLANTED]
    first_right = 0
    for i in range(200):
        text, label = stand_in_texts.review(3, i)
        words = [word.rstrip(".") for word in text.decode().split()]
        planted = [kind for word in words for kind in (0, 1) if word in kinds[kind]]
        assert 9 <= len(planted) <= 21
        assert round(np.mean(planted)) == label
        first_right += planted[0] == label
    assert 100 < first_right < 180


def test_a_stand_in_that_was_cut_off_is_noticed(tmp_path):
    TEXT.generate(tmp_path, num_train=30, num_val=6, num_test=12)
    next((tmp_path / "train/pos").iterdir()).unlink()
    with pytest.raises(ValueError, match="had 30 samples, and has 29"):
        TEXT.load(tmp_path)


def write_mails(root):
    """80 mails of 24 threads, spam without one, and one file that is no mail."""
    number = 0
    for t in range(24):
        for reply in range(3):
            number += 1
            subject = ("Re: [list] " if reply else "") + f"About matter {t}"
            own = f"I think of {t}, {reply} in own words, at length."
            path = root / "easy-ham-1" / f"{number:05}.{'ab12' * 8}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = ["From a@b Mon", f"Subject: {subject}", "List-Id: <l>", ""]
            lines += [f"> quoted {t}", "On Monday X wrote:", own, own, f"about matter {t}", ""]
            path.write_text("\n".join(lines))
    (root / "spam-1").mkdir()
    for i in range(8):
        html = f"Content-Type: text/html; charset=nonsense\nSubject: Buy {i}\n\n"
        (root / "spam-1" / f"{i}.txt").write_bytes(html.encode() + b"\xff buy this " * (9 + i))
    (root / "spam-1" / "index.json").write_text("[]")
    return root


def test_mails_lose_their_headers(tmp_path):
    found = list(mails.classified(write_mails(tmp_path)))
    assert sorted({label for _, label in found}) == [0, 1]
    assert len(found) == 80
    assert not any(b"Subject" in body or b"List-Id" in body for body, _ in found)
    TEXT.generate(tmp_path / "out", source=tmp_path)
    data = TEXT.load(tmp_path / "out")
    assert sum(map(len, data.values())) == 80
    assert "SpamAssassin" in json.loads((tmp_path / "out/generated.json").read_text())["stand_in"]
    with pytest.raises(ValueError, match="source has 80 samples, 100 were asked for"):
        TEXT.generate(tmp_path / "more", source=tmp_path, num_train=76)
    assert not (tmp_path / "more").exists()


def test_threads_lose_quotes_and_subjects(tmp_path):
    threads = mails.threads(write_mails(tmp_path))
    assert sorted(map(len, threads)) == [3] * 24
    assert not any(b"quoted" in m or b"about matter" in m for thread in threads for m in thread)
    pairs = mails.pairs(threads)
    of = {mail: i for i, thread in enumerate(threads) for mail in thread}
    assert all((of[one] == of[other]) == bool(label) for one, other, label in pairs)
    assert sum(label for *_, label in pairs) == len(pairs) // 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no mails"):
        mails.threads(tmp_path / "empty")
    with pytest.raises(ValueError, match="must be a folder of mails"):
        mails.threads(tmp_path / "absent")
