"""Plot the error that favor_error predicts beside the measured: docs/benchmarks/favor-error.png.

python benchmarks/favor_error.py
"""

from __future__ import annotations

from pathlib import Path

import torch

from fastattn import ops

PICTURE = Path(__file__).parent.parent / "docs" / "benchmarks" / "favor-error.png"
D, M, DRAWS = 64, 256, 2000
# |x| = |y|, at right angles; beyond, rare draws decide, which a sample of 2000 does not hold
LENGTHS = [0.15 * i for i in range(1, 11)]


def measured(length: float, w: torch.Tensor) -> float:
    """The relative standard deviation of exp(x·y) over the draws w."""
    x, y = torch.zeros(2, D, dtype=torch.float64)
    x[0] = y[1] = length
    logits = w @ (x + y) - (x.square().sum() + y.square().sum()) / 2
    estimates = logits.exp().mean(-1)
    return (estimates.std() / (x @ y).exp()).item()


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    squares = [2 * length**2 for length in LENGTHS]
    predicted = []
    for length in LENGTHS:
        x, y = torch.zeros(2, 1, 1, 1, D)
        x[..., 0] = y[..., 1] = length
        predicted.append(ops.favor_error(x, y, M, scale=1.0).item())
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(squares, predicted, color="black", label="predicted, iid")
    for kind, mark in (("iid", "o"), ("orthogonal", "x")):
        w = ops.draw_projection(M, D, kind=kind, num_heads=DRAWS).double()
        values = [measured(length, w) for length in LENGTHS]
        axes.plot(squares, values, mark, ms=5, label=f"measured, {kind}")
    axes.set_yscale("log")
    axes.set(xlabel="|x + y|²", ylabel=f"relative error of exp(x·y), m = {M}, d = {D}")
    axes.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
