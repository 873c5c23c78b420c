"""Convolution with a short kernel as a mixer: how far does locality go?

Miralles-González et al. 2025, "On the locality bias and results in the Long Range Arena",
arXiv:2501.14850.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastattn.lra.padding import Padding


class ConvMixer(nn.Module):
    """A convolution to a wider space, the activation, and a linear layer back; O(n·kernel).

    Args:
        width: Of the tokens.
        kernel: Taps, an odd number; a token sees (kernel - 1) / 2 of them either way.
        groups: Of channels that see only their own; must divide both widths.
        hidden: The wider width; None means twice ``width``, as in the source.
        activation: Between the two.

    Raises:
        ValueError: A number does not fit.
    """

    def __init__(
        self,
        width: int,
        *,
        kernel: int = 7,
        groups: int = 1,
        hidden: int | None = None,
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        hidden = 2 * width if hidden is None else hidden
        check_kernel(kernel)
        if groups < 1 or width % groups or hidden % groups:
            raise ValueError(f"groups must divide the widths {width} and {hidden}, got {groups}")
        self.reach = (kernel // 2, kernel // 2)
        self.conv = nn.Conv1d(width, hidden, kernel, padding=kernel // 2, groups=groups)
        self.activation = activation()
        self.out_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor, padding: Padding) -> Tensor:
        """``(b, n, width)`` to the same."""
        y = self.conv(padding.clear(x).mT).mT
        return self.out_proj(self.activation(y))


def check_kernel(kernel: int) -> None:
    if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be an odd number of taps, got {kernel!r}")
