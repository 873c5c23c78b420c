"""The functional API: every tensor is ``(b, h, n, d)``, every op takes ``backend=None``."""

from fastattn.ops.block_sparse import (
    block_sparse_attention,
    block_sparse_attention_reference,
)
from fastattn.ops.block_sparse_layout import BlockLayout
from fastattn.ops.favor import (
    favor_attention,
    favor_attention_reference,
    favor_attention_scan,
)
from fastattn.ops.favor_directions import draw_projection, favor_error, oprf_constant
from fastattn.ops.fft_conv import (
    ConvState,
    fft_conv,
    fft_conv_prefill,
    fft_conv_reference,
    fft_conv_step,
)
from fastattn.ops.linear_attention import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    linear_attention_scan,
    linear_attention_scan_reference,
)
from fastattn.ops.linformer import linformer_attention, linformer_attention_reference

__all__ = [
    "BlockLayout",
    "ConvState",
    "LinearState",
    "block_sparse_attention",
    "block_sparse_attention_reference",
    "draw_projection",
    "favor_attention",
    "favor_attention_reference",
    "favor_attention_scan",
    "favor_error",
    "fft_conv",
    "fft_conv_prefill",
    "fft_conv_reference",
    "fft_conv_step",
    "linear_attention",
    "linear_attention_reference",
    "linear_attention_scan",
    "linear_attention_scan_reference",
    "linformer_attention",
    "linformer_attention_reference",
    "oprf_constant",
]
