"""Archives of the public data, unpacked without leaving their folder."""

from __future__ import annotations

import os
import platform
import tarfile
import zipfile
import zlib
from lzma import LZMAError
from pathlib import Path, PurePosixPath, PureWindowsPath

from fastattn.lra import files

_TARS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")


def unpack(archive: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Unpack a tar, compressed or not, or a zip. What it is, its first bytes say, not its name.

    ``lra_release.gz`` is a tar, for one. Files, folders and symbolic links that point inside are
    written; anything else, and what leads out of ``out``, is refused, and then nothing is left.

    Args:
        archive: The file.
        out: A directory that is new or empty.

    Raises:
        ValueError: It is no archive, is damaged or cut off, or a member would leave ``out``.
    """
    archive, out = Path(archive), Path(out)
    if not archive.is_file():
        raise ValueError(f"archive must be a file, and {archive} is none")
    with open(archive, "rb") as file:
        head = file.read(512)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<":
        raise ValueError(
            f"{archive} is a web page that was saved as an archive: the server answered with a "
            "page, often of an error or a login. Fetch the file itself"
        )
    zipped = head.startswith(b"PK")
    if not (zipped or head.startswith(_TARS) or head[257:262] == b"ustar"):
        raise ValueError(f"{archive} is no archive: it begins with {head[:8]!r}")
    with files.staged(out) as part:
        try:
            _unzip(archive, part) if zipped else _untar(archive, part)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, LZMAError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{archive} is damaged or cut off ({reason}): fetch it again"
            ) from None


def _untar(archive: Path, part: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise ValueError(
            f"{archive} is not unpacked: tarfile of Python {platform.python_version()} cannot keep "
            "members inside a folder. Python 3.10.12, 3.11.4 and later can; or unpack it by tar"
        )
    size = archive.stat().st_size
    with (
        open(archive, "rb") as file,
        files.progress(f"unpack {archive.name}", size) as advance,
        tarfile.open(fileobj=file, mode="r:*") as tar,
    ):
        done = 0
        for member in tar:
            if member.islnk():
                raise ValueError(f"{archive} is not unpacked: {member.name} is a hard link")
            try:
                tar.extract(member, part, filter="data")
            except tarfile.FilterError as error:
                raise ValueError(f"{archive} is not unpacked: {error}") from None
            tar.members.clear()  # type: ignore[attr-defined]  # millions of images need no list of what is done
            advance(file.tell() - done)
            done = file.tell()


def _unzip(archive: Path, part: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        members = opened.infolist()
        for member in members:
            paths = PurePosixPath(member.filename), PureWindowsPath(member.filename)
            if any(path.is_absolute() or path.drive or ".." in path.parts for path in paths):
                raise ValueError(f"{archive} is not unpacked: {member.filename!r} would leave out")
        with files.progress(f"unpack {archive.name}", len(members)) as advance:
            for member in members:
                opened.extract(member, part)
                advance(1)
