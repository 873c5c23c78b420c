"""FAVOR+ as a drop-in for ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastattn import _check
from fastattn.nn.recurrent import Recurrent
from fastattn.ops import (
    LinearState,
    draw_projection,
    favor_attention,
    favor_attention_scan,
    linear_attention,
    oprf_constant,
)
from fastattn.ops.favor import BACKENDS, VARIANTS
from fastattn.ops.favor_directions import KINDS
from fastattn.ops.linear_attention import in_full_precision


class PerformerAttention(Recurrent):
    """Softmax attention estimated by positive random features, in O(n) (Choromanski et al. 2021).

    Takes the place of ``nn.MultiheadAttention``: same arguments, same parameters, same initial
    values from the same seed, and a stock state dict loads strictly (the projection is then the one
    first drawn). How close it comes to softmax attention depends on the size of queries and
    keys: see :func:`fastattn.ops.favor_error`. Dropout acts on the output, since the weights never
    exist.

    The directions are a buffer ``projection`` ``(num_features, head_dim)`` in float32, whatever
    ``dtype``, shared by the heads and saved with the module; a copy has the same. Layers differ by
    their seeds, or by their numbers, from ``convert`` or :func:`fastattn.nn.number_layers`.

    Args:
        embed_dim ... dtype: As in ``nn.MultiheadAttention``, in the same order.
        num_features: Random directions, 1 to 512; the error falls as its square root.
        variant: "positive", "hyperbolic", "oprf" or "relu", as in
            :func:`fastattn.ops.favor_attention`. "oprf" has its constant in the buffer
            ``oprf_constant`` ``(num_heads,)``, at first the best for normal queries and keys.
        kind: "orthogonal" or "iid", as in :func:`fastattn.ops.draw_projection`.
        seed: Of the draw.
        redraw: "never"; "manual" (you call :meth:`redraw_projection`); or every so many training
            steps, an integer: :func:`fastattn.nn.redraw_projections`, called after each, does it.
        learned: The directions are a parameter and start as drawn.
        qk_norm: Bring queries and keys to a length that each head learns (``qk_gain``, at first
            such that the scaled vectors have length 1), where the estimate is good. Vectors shorter
            than about √d / 100 stay shorter.
        compat: None, or "jax": the upstream formula, with its eps of 1e-4 and its maxima over
            tokens, for parity with models trained there. At ordinary norms it gives nearly the mean
            of the values, and a causal row sees the future through the maximum.
        causal: Whether a token sees only the past, in every call. A causal mask or the hint
            ``is_causal=True`` in a call does the same for that call.
        backend: Passed to the op; None picks the fastest that can run.
    """

    _own_state = ("projection", "oprf_constant", "qk_gain")
    projection: Tensor
    qk_gain: Tensor

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
        num_features: int = 256,
        variant: str = "positive",
        kind: str = "orthogonal",
        seed: int = 0,
        redraw: str | int = "never",
        learned: bool = False,
        qk_norm: bool = False,
        compat: str | None = None,
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
        self._configure(
            num_features=num_features,
            variant=variant,
            kind=kind,
            seed=seed,
            redraw=redraw,
            learned=learned,
            qk_norm=qk_norm,
            compat=compat,
            causal=causal,
            backend=backend,
        )

    def _configure(
        self,
        *,
        num_features: int = 256,
        variant: str = "positive",
        kind: str = "orthogonal",
        seed: int = 0,
        redraw: str | int = "never",
        learned: bool = False,
        qk_norm: bool = False,
        compat: str | None = None,
        causal: bool = False,
        backend: str | None = None,
    ) -> None:
        if self.head_dim > 256:
            raise ValueError(
                f"a head may be up to 256 wide, got embed_dim {self.embed_dim} / {self.num_heads} "
                "heads"
            )
        if not 1 <= num_features <= 512:
            raise ValueError(f"num_features must be from 1 to 512, got {num_features}")
        _check.check_option("variant", variant, VARIANTS)
        _check.check_option("kind", kind, KINDS)
        _check_redraw(redraw, learned)
        if compat is not None:
            _check.check_option("compat", compat, ("jax",))
            if variant != "positive" or num_features > 256:
                raise ValueError(
                    'compat="jax" takes variant "positive" and up to 256 features, got '
                    f"{variant!r} and {num_features}"
                )
        if backend is not None:
            _check.check_option("backend", backend, BACKENDS["favor_attention"])
        self.num_features = num_features
        self.variant = variant
        self.kind = kind
        self.seed = seed
        self.redraw = redraw
        self.learned = learned
        self.qk_norm = qk_norm
        self.compat = compat
        self.causal = causal
        self.backend = backend
        self._reset_own()

    def _unconfigure(self) -> None:
        super()._unconfigure()
        for name in self._own_state:
            if name in self._buffers or name in self._parameters:
                delattr(self, name)

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        if "num_features" in vars(self):  # not while stock's constructor runs
            self._reset_own()

    def _reset_own(self, names: Sequence[str] | None = None) -> None:
        """Make what is in the state dict and not in stock's, as at first, where the weights are."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        device = weight.device  # not of out_proj, which loads after its parent
        values = {"projection": self._draw(0)}
        if self.qk_norm:
            values["qk_gain"] = torch.ones(self.num_heads)
        if self.variant == "oprf":
            mean_square = 2.0 if self.qk_norm else 2 * self.head_dim**0.5
            constant = oprf_constant(mean_square, self.head_dim)
            values["oprf_constant"] = torch.full((self.num_heads,), constant)
        for name, value in values.items():
            if names is not None and name not in names:
                continue
            present = getattr(self, name, None)
            if present is not None and present.device == device:
                with torch.no_grad():
                    present.copy_(value)
            elif name == "qk_gain" or (name == "projection" and self.learned):
                setattr(self, name, nn.Parameter(value.to(device)))
            else:
                self.register_buffer(name, value.to(device))

    def _number(self, layer: int) -> None:
        super()._number(layer)
        self._reset_own(("projection",))

    def redraw_projection(self, epoch: int) -> None:
        """Draw the directions anew, outside of forward and backward.

        Args:
            epoch: Names the draw, with the module's seed and layer: the same on every rank.

        Raises:
            ValueError: The module has redraw="never", as learned directions do.
        """
        if self.redraw == "never":
            raise ValueError("redraw_projection needs redraw='manual' or a number of steps")
        with torch.no_grad():
            self.projection.copy_(self._draw(epoch))

    def _draw(self, epoch: int) -> Tensor:
        return draw_projection(
            self.num_features,
            self.head_dim,
            kind=self.kind,
            seed=self.seed,
            layer=self._layer,
            epoch=epoch,
        )

    @property
    def _constant(self) -> Tensor | None:
        return self.get_buffer("oprf_constant") if self.variant == "oprf" else None

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.qk_norm:
            return q, k
        length = self.head_dim**0.25 * self.qk_gain.float().view(-1, 1, 1)  # scaled, it is the gain
        return _to_length(q, length), _to_length(k, length)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding_mask: Tensor | None
    ) -> Tensor:
        q, k = self._normed(q, k)
        if self.compat == "jax":
            return _as_in_jax(q, k, v, self.projection, causal, key_padding_mask, self.backend)
        return favor_attention(
            q,
            k,
            v,
            self.projection,
            variant=self.variant,
            causal=causal,
            key_padding_mask=key_padding_mask,
            oprf_constant=self._constant,
            backend=self.backend,
        )

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        if self.compat == "jax":
            raise ValueError(
                'compat="jax" cannot decode: its features depend on a maximum over the whole '
                "sequence. Leave compat at None"
            )
        q, k = self._normed(q, k)
        return favor_attention_scan(
            q,
            k,
            v,
            self.projection,
            state,
            variant=self.variant,
            oprf_constant=self._constant,
            backend=self.backend,
        )


def redraw_projections(model: nn.Module, step: int) -> list[str]:
    """Redraw what is due after a training step; call it after every ``optimizer.step()``.

    Every ``PerformerAttention`` that is in training mode and has an integer ``redraw`` draws its
    epoch ``step // redraw`` when ``redraw`` divides the step. The step alone decides, so all ranks
    agree, and a resumed run draws what the first would have.

    Args:
        model: Any module.
        step: Training steps done so far.

    Returns:
        The dotted names of the modules that have new directions.
    """
    redrawn = []
    for name, module in model.named_modules():
        if not isinstance(module, PerformerAttention) or not module.training:
            continue
        every = module.redraw
        if isinstance(every, int) and step > 0 and step % every == 0:
            module.redraw_projection(step // every)
            redrawn.append(name)
    return redrawn


def _check_redraw(redraw: str | int, learned: bool) -> None:
    if isinstance(redraw, str):
        _check.check_option("redraw", redraw, ("never", "manual"))
    elif type(redraw) is not int or redraw < 1:
        raise ValueError(f"redraw must be 'never', 'manual' or a positive integer, got {redraw!r}")
    if learned and redraw != "never":
        raise ValueError(f"redraw must be 'never' for learned directions, got {redraw!r}")


def _to_length(x: Tensor, length: Tensor) -> Tensor:
    """x / |x| · length; short vectors stay shorter, so that a zero one has a moderate gradient."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square().sum(-1, keepdim=True)
    return (wide * (square + 1e-4 * x.shape[-1]).rsqrt() * length).to(x.dtype)


def _as_in_jax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    causal: bool,
    mask: Tensor | None,
    backend: str | None,
) -> Tensor:
    """The formula of google-research's ``fast_attention``, eps and maxima included."""
    wide = torch.promote_types(q.dtype, torch.float32)
    x, y = (t.to(wide) * q.shape[3] ** -0.25 for t in (q, k))
    if mask is not None:
        y = y.masked_fill(mask[:, None, :, None], 0)
    w, eps = projection.to(wide), 1e-4
    with in_full_precision(q.device.type):
        u, t = x @ w.mT, y @ w.mT
    largest = t if mask is None else t.masked_fill(mask[:, None, :, None], -torch.inf)
    largest = largest.amax((-2, -1), keepdim=True).clamp(min=torch.finfo(wide).min)
    query = (u - x.square().sum(-1, keepdim=True) / 2 - u.amax(-1, keepdim=True)).exp() + eps
    key = (t - y.square().sum(-1, keepdim=True) / 2 - largest).exp() + eps
    out = linear_attention(
        query,
        key,
        v.to(wide),
        feature_map="identity",
        normalize=True,
        causal=causal,
        key_padding_mask=mask,
        backend=backend,
    )
    return out.to(v.dtype)
