"""Files: archives stay in their folder, damage is named, and a half-written set is none."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile

import pytest

from fastattn.lra import files
from fastattn.lra.archives import unpack
from fastattn.lra.cli import main
from fastattn.lra.protocols import DEFAULT, PROTOCOLS, protocol_of
from fastattn.lra.tasks import TASKS
from fastattn.lra.tasks.pathfinder_files import SETS


def write_tar(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for member in members:
            name, content = member if isinstance(member, tuple) else (member, b"x")
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
    return path


def write_zip(path, *names):
    with zipfile.ZipFile(path, "w") as opened:
        for name in names:
            opened.writestr(name, "x")
    return path


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_is_known_by_its_first_bytes(tmp_path, mode):
    archive = write_tar(tmp_path / "lra_release.gz", ("lra_release/a/b.txt", b"hi"), mode=mode)
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out/lra_release/a/b.txt").read_bytes() == b"hi"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lra_release"]


def test_a_zip_is_unpacked(tmp_path):
    unpack(write_zip(tmp_path / "lra", "lra/a.txt", "lra/b/c.txt"), tmp_path / "out")
    assert (tmp_path / "out/lra/b/c.txt").read_text() == "x"


@pytest.mark.parametrize(
    "members",
    [
        ["ok", "../evil"],
        ["ok", "a/../../evil"],
        ["ok", link("out", "/etc/passwd")],
        ["ok", link("up", "../.."), "up/evil"],
        ["ok", link("hard", "ok", tarfile.LNKTYPE)],
        ["ok", link("device", "", tarfile.CHRTYPE)],
    ],
)
def test_a_tar_that_would_leave_its_folder_is_refused_whole(tmp_path, members):
    archive = write_tar(tmp_path / "a.tar.gz", *members)
    with pytest.raises(ValueError, match="is not unpacked"):
        unpack(archive, tmp_path / "in/out")
    assert not (tmp_path / "in/out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "in"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "C:\\evil", "..\\evil"])
def test_a_zip_that_would_leave_its_folder_is_refused_whole(tmp_path, name):
    with pytest.raises(ValueError, match=r"is not unpacked: .* would leave out"):
        unpack(write_zip(tmp_path / "a.zip", "ok", name), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n<!DOCTYPE html><html>", "is a web page that was saved as an archive"),
        (b"Access denied", "is no archive: it begins with b'Access d'"),
        (b"", "is no archive"),
        (gzip.compress(b"no tar" * 999), "is damaged or cut off"),
        (b"PK\x03\x04 half", "is damaged or cut off"),
    ],
    ids=["page", "text", "nothing", "gzip", "zip"],  # bytes with a time would name it otherwise
)
def test_what_is_no_archive_is_said(tmp_path, content, message):
    (tmp_path / "aan.tar.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        unpack(tmp_path / "aan.tar.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tar_that_was_cut_off_leaves_nothing(tmp_path):
    whole = write_tar(tmp_path / "a.gz", ("a", bytes(range(256)) * 999)).read_bytes()
    (tmp_path / "a.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is damaged or cut off"):
        unpack(tmp_path / "a.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_old_python_unpacks_zips_and_says_why_not_tars(tmp_path, monkeypatch):
    # 3.10 before .12, and 3.11 before .4
    monkeypatch.delattr(tarfile, "data_filter")
    monkeypatch.delattr(tarfile, "FilterError")
    unpack(write_zip(tmp_path / "a.zip", "a"), tmp_path / "zip")
    assert (tmp_path / "zip/a").exists()
    with pytest.raises(ValueError, match=r"cannot keep members inside.* 3\.10\.12, 3\.11\.4 and"):
        unpack(write_tar(tmp_path / "a.tar.gz", "a"), tmp_path / "tar")
    (tmp_path / "b.zip").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(ValueError, match="is damaged or cut off"):
        unpack(tmp_path / "b.zip", tmp_path / "tar")
    assert not (tmp_path / "tar").exists()


def test_the_command_unpacks_and_writes_over_nothing(tmp_path, capsys):
    archive = write_tar(tmp_path / "lra_release.gz", "lra_release/x")
    command = ["unpack", str(archive), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "lra_release" in capsys.readouterr().out
    assert main(command) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["unpack", str(tmp_path / "none"), "--out", str(tmp_path / "o")]) == 2
    assert "archive must be a file" in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_names_the_command_for_an_archive(task, tmp_path):
    archive = write_tar(tmp_path / "lra_release.gz", "lra_release/x")
    for data_dir in (archive, tmp_path):
        with pytest.raises(ValueError, match=r"fastattn-lra unpack .*lra_release\.gz --out DIR"):
            TASKS[task].load(data_dir)
    with pytest.raises(ValueError, match="does not exist"):
        TASKS[task].load(tmp_path / "absent")


@pytest.mark.parametrize("where", ["", "lra_release", "lra_release/lra_release"])
def test_a_directory_at_any_depth_is_found(tmp_path, where):
    folder = tmp_path / where / "tsv_data"
    folder.mkdir(parents=True)
    (folder / "a.tsv").touch()
    assert files.locate(tmp_path, "tsv_data", ["a.tsv"]) == folder
    assert files.locate(folder, "tsv_data", ["a.tsv"]) == folder


@pytest.mark.parametrize(
    ("task", "part", "message"),
    [
        ("listops", "basic_val.tsv", r"has basic_val\.tsv but lacks basic_train\.tsv, basic_test"),
        ("text", "train/pos/0_7.txt", "holds reviews but lacks train/neg, test/neg, test/pos"),
        ("text", "imdb_test.tsv", "holds reviews but lacks train"),
        ("retrieval", "tsv_data/new_aan_pairs.test.tsv", r"lacks new_aan_pairs\.train\.tsv"),
        ("image", "cifar-10-batches-bin/test_batch.bin", r"lacks data_batch_1\.bin"),
        ("pathfinder", f"pathfinder64/{SETS['easy']}/imgs/0/sample_0.png", "one of imgs and meta"),
        ("pathx", f"pathfinder128/{SETS['hard']}/metadata/0.npy", "one of imgs and metadata"),
    ],
)
def test_part_of_a_task_is_not_the_same_as_none_of_it(tmp_path, task, part, message):
    with pytest.raises(files.NotHereError):
        TASKS[task].find(tmp_path)
    (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / part).touch()
    with pytest.raises(ValueError, match=message) as error:
        TASKS[task].find(tmp_path)
    assert not isinstance(error.value, files.NotHereError)


def interrupted(out):
    with files.staged(out) as part:
        (part / "a").touch()
        raise KeyboardInterrupt


def test_what_breaks_while_it_is_written_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with files.staged(tmp_path / "out") as part:
        (part / "a").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_damaged_record_is_said(tmp_path):
    assert files.generated(tmp_path) is None
    (tmp_path / "generated.json").write_text("{}")
    with pytest.raises(ValueError, match=r"generated\.json is damaged"):
        files.generated(tmp_path)


def test_every_protocol_has_a_source_and_an_unknown_one_raises():
    assert protocol_of(None) is DEFAULT is PROTOCOLS["default"]
    assert {"lra2020", "s4", "mega", "locality", "slides"} < set(PROTOCOLS)
    assert all(name == p.name and p.source for name, p in PROTOCOLS.items())
    with pytest.raises(ValueError, match=r"protocol must be one of default, .* got 'lra'"):
        protocol_of("lra")
