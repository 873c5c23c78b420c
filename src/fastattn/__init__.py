"""Sub-quadratic attention for PyTorch, drop-in for ``nn.MultiheadAttention``.

Importing this package has no effect beyond defining names: it starts no CUDA context, and needs
neither triton nor a GPU. ``python -m fastattn.env`` says what can run here.
"""

from fastattn import ops
from fastattn.convert import convert, revert
from fastattn.nn import (
    MECHANISMS,
    BigBirdAttention,
    LinearAttention,
    LinformerAttention,
    LongConv,
    PerformerAttention,
    ToeplitzMix,
)

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS",
    "BigBirdAttention",
    "LinearAttention",
    "LinformerAttention",
    "LongConv",
    "PerformerAttention",
    "ToeplitzMix",
    "__version__",
    "convert",
    "ops",
    "revert",
]
