"""The mechanisms as modules; a new one is one file here and one line in ``MECHANISMS``."""

from fastattn.nn.bigbird import BigBirdAttention
from fastattn.nn.linear import LinearAttention
from fastattn.nn.linformer import LinformerAttention
from fastattn.nn.long_conv import LongConv, ToeplitzMix
from fastattn.nn.multihead import MultiHead, number_layers
from fastattn.nn.performer import PerformerAttention, redraw_projections

MECHANISMS: dict[str, type[MultiHead]] = {
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "bigbird": BigBirdAttention,
    "linformer": LinformerAttention,
}

__all__ = [
    "MECHANISMS",
    "BigBirdAttention",
    "LinearAttention",
    "LinformerAttention",
    "LongConv",
    "MultiHead",
    "PerformerAttention",
    "ToeplitzMix",
    "number_layers",
    "redraw_projections",
]
