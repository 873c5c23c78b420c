"""The functional API: every tensor is ``(b, h, n, d)``, every op takes ``backend=None``."""

from fastattn.ops.linear_attention import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    linear_attention_scan,
    linear_attention_scan_reference,
)

__all__ = [
    "LinearState",
    "linear_attention",
    "linear_attention_reference",
    "linear_attention_scan",
    "linear_attention_scan_reference",
]
