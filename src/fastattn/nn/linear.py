"""Linear attention as a drop-in for ``nn.MultiheadAttention``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import _check
from fastattn.nn.recurrent import Recurrent
from fastattn.ops.linear_attention import (
    BACKENDS,
    FEATURE_MAPS,
    LinearState,
    linear_attention,
    linear_attention_scan,
)


class LinearAttention(Recurrent):
    """Multi-head linear attention in O(n) time and memory (Katharopoulos et al. 2020).

    Takes the place of ``nn.MultiheadAttention``: same arguments, same parameters, same initial
    values from the same seed, and a stock state dict loads strictly. It computes another function
    than softmax attention, so weights trained with softmax need fine-tuning. Dropout acts on the
    output, since the weights never exist.

    Args:
        embed_dim ... dtype: As in ``nn.MultiheadAttention``, in the same order.
        feature_map: "elu", "relu", "squared_relu", "exp" or "identity"; "identity" has signed
            weights and is not normalised.
        causal: Whether a token sees only the past, in every call. A causal mask or the hint
            ``is_causal=True`` in a call does the same for that call.
        backend: Passed to the op; None picks the fastest that can run.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        feature_map: str = "elu",
        causal: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self._configure(feature_map=feature_map, causal=causal, backend=backend)

    def _configure(
        self, *, feature_map: str = "elu", causal: bool = False, backend: str | None = None
    ) -> None:
        _check.check_option("feature_map", feature_map, FEATURE_MAPS)
        if backend is not None:
            _check.check_option("backend", backend, BACKENDS["linear_attention"])
        self.feature_map = feature_map
        self.causal = causal
        self.backend = backend

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding_mask: Tensor | None
    ) -> Tensor:
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            causal=causal,
            key_padding_mask=key_padding_mask,
            backend=self.backend,
        )

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        return linear_attention_scan(
            q, k, v, state, feature_map=self.feature_map, backend=self.backend
        )
