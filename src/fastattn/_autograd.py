"""Call an autograd function without binding its signature anew at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function


def apply(function: type[Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, for a function with ``setup_context`` and no defaults.

    ``Function.apply`` inspects the Python signature first, to fill in defaults: 30 µs a call, more
    than a short kernel takes. The compiler and ``torch.func`` have their own ways and keep them.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(Function, function).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]
