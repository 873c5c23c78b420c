"""The mechanisms as modules; a new one is one file here and one line in ``MECHANISMS``."""

from fastattn.nn.linear import LinearAttention
from fastattn.nn.multihead import MultiHead

MECHANISMS: dict[str, type[MultiHead]] = {"linear": LinearAttention}

__all__ = ["MECHANISMS", "LinearAttention", "MultiHead"]
