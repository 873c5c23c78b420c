"""Checkpoints that are whole or not there, in one file or in pieces of at most 16 MB.

A file is written beside the old one and takes its name at last. In pieces, the named file is a
short list of them: the pieces are written under new names first, and the old ones go after the
list has been replaced. A run that is killed at any moment leaves a checkpoint that loads.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

PIECE = 16_000_000  # bytes


class CheckpointFiles(TorchCheckpointIO):
    """How Lightning writes and reads checkpoints.

    Args:
        pieces: Write none larger than 16 MB. Either form is read, whatever this says.
    """

    def __init__(self, *, pieces: bool = False) -> None:
        self.pieces = pieces

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Replace the checkpoint at ``path``."""
        path = Path(path)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        content = buffer.getbuffer()
        path.parent.mkdir(parents=True, exist_ok=True)
        names = []
        if self.pieces:
            digest = hashlib.sha256(content).hexdigest()
            for i, start in enumerate(range(0, len(content), PIECE)):
                names.append(f"{path.name}.{digest[:12]}.{i:03d}")
                _write(path.with_name(names[-1]), content[start : start + PIECE])
            index = {"pieces": names, "bytes": len(content), "sha256": digest}
            content = memoryview(json.dumps(index, indent=2).encode())
        _write(path, content)
        _remove_pieces(path, keep=names)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As :func:`read_checkpoint`; Lightning's options would allow more than tensors."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it with its pieces."""
        Path(path).unlink(missing_ok=True)
        _remove_pieces(Path(path), keep=[])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of a run, on the CPU.

    Raises:
        ValueError: It is damaged, or nothing that a run of ours has written.
    """
    try:
        content = _content(path)
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not {"fastattn", "state_dict", "global_step"} <= checkpoint.keys():
            raise ValueError("it was not written by fastattn")
    except Exception as error:  # torch.load raises nearly anything on a damaged file
        raise ValueError(f"{path} is damaged or no checkpoint of ours: {error}") from None
    return checkpoint


def digest(path: Path) -> str:
    """SHA-256 of a checkpoint, the same whole or in pieces."""
    return hashlib.sha256(_content(path)).hexdigest()


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    return _join(path, json.loads(content)) if content.startswith(b"{") else content


def _join(path: Path, index: dict[str, Any]) -> bytes:
    content = b"".join(path.with_name(Path(name).name).read_bytes() for name in index["pieces"])
    if hashlib.sha256(content).hexdigest() != index["sha256"]:
        raise ValueError(f"its pieces have {len(content)} bytes of {index['bytes']}, or others")
    return content


def _write(path: Path, content: memoryview) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _remove_pieces(path: Path, keep: list[str]) -> None:
    piece = re.compile(re.escape(path.name) + r"\.[0-9a-f]{12}\.\d{3}(\.part)?")
    for other in path.parent.iterdir() if path.parent.is_dir() else ():
        if piece.fullmatch(other.name) and other.name not in keep:
            other.unlink(missing_ok=True)
