"""Every number that depends on the hardware, and nothing else.

A kernel file holds no block size and a kernel never asks which GPU it runs on: it takes what it
needs from here. When a number changes, the commit says on which device it was measured.
"""

from __future__ import annotations


def causal_chunk(d: int) -> int:
    """Tokens per chunk of the causal torch path.

    A chunk of c tokens costs c·c scores and one (d, e) state: c near the head width keeps both,
    and so the memory per token, at O(d).
    """
    return 64 if d <= 64 else 128
