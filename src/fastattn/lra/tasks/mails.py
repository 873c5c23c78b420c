"""Mails that stand in for IMDB and the ACL anthology: SpamAssassin's public corpus, by folder.

Classes are the folders, whose names say spam or ham. Headers are dropped, for they would decide.
A thread is the mails of one subject; two mails of it are to be told from two of different threads
by what they say, so that quoted lines and the subject itself are dropped as well.
"""

from __future__ import annotations

import email
import hashlib
import re
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

_REPLY = re.compile(r"^\s*((re|fwd?|aw|sv)\s*(\[\d+\])?\s*:|\[[^\]]*\])\s*", re.IGNORECASE)
_QUOTED = re.compile(rb"^\s*([>|:}]|[A-Za-z]{1,4}>)|wrote:\s*$|^-+ ?Original Message")
_SHORTEST = 64  # bytes of a body that says something
_MOST = 8  # pairs of one thread


def classified(source: Path) -> Iterator[tuple[bytes, int]]:
    """The body of each mail, and 0 for spam, 1 for ham."""
    for path, label in _paths(source):
        body = _body(email.message_from_bytes(path.read_bytes()))
        if len(body) >= _SHORTEST:
            yield body, label


def threads(source: Path) -> list[list[bytes]]:
    """The mails of each thread of two and more, in an order that their subjects decide."""
    found: dict[str, dict[bytes, None]] = {}
    for path, _ in _paths(source):
        message = email.message_from_bytes(path.read_bytes())
        subject = _subject(message)
        lines = _body(message).split(b"\n")
        own = [
            line
            for line in lines
            if not _QUOTED.search(line) and subject not in line.decode().lower()
        ]
        body = b"\n".join(own).strip()
        if subject and len(body) >= _SHORTEST:
            found.setdefault(subject, {})[body] = None
    order = sorted(found, key=lambda subject: hashlib.blake2b(subject.encode()).digest())
    return [list(found[subject]) for subject in order if len(found[subject]) > 1]


def pairs(threads: list[list[bytes]]) -> list[tuple[bytes, bytes, int]]:
    """Neighbours of a thread (1), each followed by the first with a mail of another thread (0)."""
    made = []
    for i, thread in enumerate(threads):
        other = threads[i - 1]
        for j in range(min(len(thread) - 1, _MOST)):
            made.append((thread[j], thread[j + 1], 1))
            made.append((thread[j], other[j % len(other)], 0))
    return made


def _paths(source: Path) -> list[tuple[Path, int]]:
    """The mails under ``source`` and their classes, by the name of their folder."""
    if not source.is_dir():
        raise ValueError(f"source must be a folder of mails, and {source} is none")
    found = []
    for path in sorted(source.rglob("*")):
        folder = path.parent.name.lower()
        ours = path.suffix == ".txt" or re.fullmatch(r"\d+\.[0-9a-f]+", path.name)
        if ours and path.is_file() and ("spam" in folder or "ham" in folder):
            found.append((path, 0 if "spam" in folder and "ham" not in folder else 1))
    if not found:
        raise ValueError(
            f"source {source} has no mails: expected text files in folders whose names say spam or "
            "ham, as in SpamAssassin's corpus"
        )
    return found


def _subject(message: Message) -> str:
    subject = " ".join(str(message.get("Subject", "")).split())
    while True:
        shorter = _REPLY.sub("", subject)
        if shorter == subject:
            return subject.lower()
        subject = shorter


def _body(message: Message) -> bytes:
    """The text of a mail in UTF-8, the plain one where there are several."""
    parts = [part for part in message.walk() if part.get_content_maintype() == "text"]
    plain = [part for part in parts if part.get_content_subtype() == "plain"] or parts
    texts = []
    for part in plain:
        payload = part.get_payload(decode=True)
        raw = payload if isinstance(payload, bytes) else b""
        try:
            texts.append(raw.decode(part.get_content_charset() or "utf-8"))
        except (LookupError, UnicodeDecodeError):
            texts.append(raw.decode("latin-1"))
    return "\n".join(texts).replace("\0", "").replace("\r\n", "\n").strip().encode()
