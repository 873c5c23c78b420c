"""The random directions of FAVOR+, and what to expect of them."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from fastattn import _check
from fastattn.ops.linear_attention import in_full_precision

KINDS = ("orthogonal", "iid")


def draw_projection(
    num_features: int,
    head_dim: int,
    *,
    kind: str = "orthogonal",
    num_heads: int | None = None,
    seed: int = 0,
    layer: int = 0,
    epoch: int = 0,
) -> Tensor:
    """Draw random directions; each alone is N(0, 1), whatever the kind.

    The same arguments give the same directions on every device, rank and call, and no global random
    state is touched.

    Args:
        num_features: m, at least 1.
        head_dim: d, at least 1.
        kind: "orthogonal": blocks of d rows of a Haar distributed matrix (the signs of the QR
            factorisation fixed; without that its rows have a mean), each row with the norm of an
            independent normal vector. "iid": independent rows, of larger variance.
        num_heads: Draw one set for each of so many heads.
        seed: Any integer; with layer and epoch it names the draw.
        layer: Another number draws independently, likewise epoch.

    Returns:
        ``(m, d)`` or ``(num_heads, m, d)``, float32, on the CPU.

    Raises:
        ValueError: A count below 1, or an unknown kind.
    """
    _check.check_option("kind", kind, KINDS)
    heads = 1 if num_heads is None else num_heads
    counts = {"num_features": num_features, "head_dim": head_dim, "num_heads": heads}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    draw = repr((int(seed), int(layer), int(epoch))).encode()
    digest = hashlib.blake2b(draw, digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "big") >> 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    if kind == "iid":
        found = normal(heads, num_features, head_dim)
    else:
        blocks = -(-num_features // head_dim)
        rotation, triangle = torch.linalg.qr(normal(heads, blocks, head_dim, head_dim))
        signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(rotation)
        rows = (rotation * signs.unsqueeze(-2)).flatten(1, 2)[:, :num_features]
        found = rows * normal(heads, num_features, head_dim).norm(dim=-1, keepdim=True)
    return (found[0] if num_heads is None else found).float().contiguous()


def favor_error(q: Tensor, k: Tensor, num_features: int, *, scale: float | None = None) -> Tensor:
    """Predict how far FAVOR+ is off: the relative standard deviation of each kernel value.

    √((exp(‖x + y‖²) - 1) / m) for m independent directions of variant "positive", where x and y
    are the scaled query and key: values above 1 mean that the estimate of exp(x·y) is noise.
    Orthogonal directions and "hyperbolic" do a little better; "oprf" does by an order of magnitude
    where values are above 100, which leaves noise all the same.

    Args:
        q: Queries, ``(b, h, n, d)``.
        k: Keys, ``(b, h_kv, s, d)``; h_kv divides h.
        num_features: m.
        scale: As in :func:`favor_attention`.

    Returns:
        ``(b, h, n, s)`` in float32, or float64 for float64 inputs; inf where it overflows.

    Raises:
        TypeError: A dtype is not floating or differs.
        ValueError: A shape, width or option does not fit.
    """
    _check.check_qkv(q, k, k)
    if num_features < 1:
        raise ValueError(f"num_features must be at least 1, got {num_features}")
    wide = torch.promote_types(q.dtype, torch.float32)
    root = math.sqrt(check_scale(scale, q.shape[3]))
    x, y = q.to(wide) * root, k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) * root
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    with in_full_precision(q.device.type):
        square = (squares + 2 * x @ y.mT).clamp(min=0)  # ‖x + y‖²
    return (square.expm1() / num_features).sqrt()


def oprf_constant(mean_square: float, head_dim: int) -> float:
    """The A of variant "oprf" with the least variance where ‖x + y‖² is ``mean_square`` on average.

    Likhosherstov et al. 2022, section 4.2. Zero for a mean of zero, where "oprf" is "positive".

    Args:
        mean_square: The mean of ‖x + y‖² over queries and keys, x and y scaled by √scale.
        head_dim: d.

    Raises:
        ValueError: A negative mean, or a head_dim below 1.
    """
    if not mean_square >= 0:
        raise ValueError(f"mean_square must not be negative, got {mean_square}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if mean_square == 0:
        return 0.0
    f, d = mean_square, head_dim
    rho = (math.sqrt((2 * f + d) ** 2 + 8 * d * f) - 2 * f - d) / (4 * f)
    return (1 - 1 / rho) / 8


def check_scale(scale: float | None, d: int) -> float:
    """The scale of the logits, d^-0.5 for None.

    Raises:
        ValueError: It is not positive.
    """
    if scale is None:
        return d**-0.5
    if not 0 < scale < math.inf:  # a compiler knows comparisons of symbols
        raise ValueError(f"scale must be positive, got {scale}")
    return float(scale)  # kernels are compiled for a float
