"""Retrieval: two documents a sample; a quote in a row is a letter and merges nothing."""

from __future__ import annotations

import pytest
import torch
from test_lra_text import write_mails

from fastattn.lra.analysis import shared
from fastattn.lra.data import BatchStream
from fastattn.lra.loading import Shares, loader
from fastattn.lra.tasks import stand_in_texts
from fastattn.lra.tasks.retrieval import FILES, RETRIEVAL


def rows(n: int, name: str = "") -> list[str]:
    return [f"{i % 2}.0\tA{i}\tB{i}\t{name} one {i} é\t{name} other {i}" for i in range(n)]


def write(root, **changed):
    root.mkdir(parents=True, exist_ok=True)
    for name, file in FILES.items():
        content = changed.get(name, "\n".join(rows(6, name)) + "\n")
        (root / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.mark.parametrize("depth", ["", "tsv_data", "lra_release/tsv_data",
                                   "lra_release/lra_release/tsv_data"])  # fmt: skip
def test_pairs_are_read_at_every_depth(tmp_path, depth):
    write(tmp_path / depth)
    data = RETRIEVAL.load(tmp_path)
    assert data.record["folder"] == str(tmp_path / depth)
    test = data["test"]
    assert (len(test), test.parts, RETRIEVAL.parts) == (6, 2, 2)
    assert bytes(test.document(2)).decode() == "test one 1 é"
    assert bytes(test.document(3)).decode() == "test other 1"
    assert test.labels.tolist() == [0, 1] * 3
    assert "not the whole public data: train has 6, not 147086" in data.record["notes"][0]


def test_batches_are_the_same_from_workers_with_both_documents_of_a_pair(tmp_path):
    """Row 48: several workers broke S4's loader of this task."""
    train = "\n".join(f"{i % 2}\ta\tb\t{'x' * (i + 1)}\t{'y' * (30 - i)}" for i in range(25))
    stream = BatchStream(RETRIEVAL.load(write(tmp_path, train=train))["train"], 4, seed=0)
    one, two = (list(loader(Shares(stream, 0, 1), range(14), workers)) for workers in (0, 2))
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(a.batch, b.batch, strict=True))
        for first, second in b.batch.lengths.reshape(-1, 2).tolist():
            assert first + second == 31, step  # of one pair


def test_a_lone_quote_keeps_five_columns_and_every_row(tmp_path):
    quoted = rows(6)
    quoted[1] = quoted[1].replace("other", '"other')
    quoted[4] = quoted[4].replace("one", 'o"ne')
    write(tmp_path, train="\r\n".join(quoted) + "\r\n", val="\n".join(quoted))  # no last newline
    data = RETRIEVAL.load(tmp_path)
    assert len(data["train"]) == len(data["val"]) == 6
    assert bytes(data["train"].document(3)) == b' "other 1'
    assert bytes(data["val"].document(11)) == b" other 5"


def test_a_document_ends_after_4000_bytes(tmp_path):
    long = "é" * 10_500
    write(tmp_path, test=f"1.0\ta\tb\t{long}\tshort\n0\ta\tb\t\tx\n")
    test = RETRIEVAL.load(tmp_path)["test"]
    assert bytes(test.document(0)) == long[:10_000].encode()[:4000]
    assert test.document_lengths.tolist() == [4000, 5, 1, 1]  # an empty one is a space
    assert test.lengths.tolist() == [4000, 1]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("1.0\ta\tb\tc\n", "line 1: expected 5 columns .* got 4"),
        ("1.0\ta\tb\tc\td\n2.0\ta\tb\tc\td\n", "line 2: the label must be 0.0 or 1.0, got b'2.0'"),
        ("label\tid1\tid2\ttext1\ttext2\n", "line 1: the label must be"),
        ("", "is empty"),
        ("1.0\ta\tb\tc\td\n", "1 samples of class 1 and none of another"),
        ("<!DOCTYPE html>\n<html>\n", "line 1: expected 5 columns"),
    ],
)
def test_a_damaged_file_is_one_sentence_with_the_line(tmp_path, train, message):
    write(tmp_path, train=train)
    with pytest.raises(ValueError, match=message):
        RETRIEVAL.load(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"new_aan_pairs\.train\.tsv, .*eval\.tsv, .*test\.tsv"):
        RETRIEVAL.load(tmp_path)
    write(tmp_path)
    (tmp_path / FILES["val"]).unlink()
    with pytest.raises(ValueError, match=r"lacks new_aan_pairs\.eval\.tsv"):
        RETRIEVAL.load(tmp_path)


def test_a_stand_in_is_the_seed_and_needs_both_texts(tmp_path):
    for name in "ab":
        RETRIEVAL.generate(tmp_path / name, num_train=20, num_val=4, num_test=8)
    a, b = (RETRIEVAL.load(tmp_path / name) for name in "ab")
    for name, file in FILES.items():
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert a[name].fingerprint() == b[name].fingerprint()
    assert "topic" in a.record["stand_in"]
    assert a.record["notes"] == []


def areas(text):
    words = [word.rstrip(".") for word in text.decode().split()]
    return frozenset(word[-2:] for word in words if word[-2:] in stand_in_texts.AREAS)


def test_two_texts_are_of_one_topic_or_of_two_and_a_topic_is_of_one_split():
    topics = {}
    for split in ("train", "val", "test"):
        for i in range(60):
            one, other, label = stand_in_texts.pair(0, split, i)
            assert len(areas(one)) == len(areas(other)) == 3
            assert len(areas(one) & areas(other)) == 3 * label
            topics.setdefault(split, set()).update((areas(one), areas(other)))
    assert not topics["train"] & topics["test"] | topics["train"] & topics["val"]
    assert not topics["val"] & topics["test"]


def test_threads_are_split_whole(tmp_path):
    write_mails(tmp_path)
    RETRIEVAL.generate(tmp_path / "out", source=tmp_path, num_train=20)
    data = RETRIEVAL.load(tmp_path / "out")
    assert len(data["train"]) == 20
    assert "thread" in data.record["stand_in"]
    texts = [{bytes(split.document(j)) for j in range(2 * len(split))} for split in data.values()]
    assert not texts[0] & texts[1] | texts[0] & texts[2] | texts[1] & texts[2]
    assert shared(data["train"], data["test"]) == 0
    with pytest.raises(ValueError, match="num_test must be 2 to"):
        RETRIEVAL.generate(tmp_path / "more", source=tmp_path, num_test=1000)
