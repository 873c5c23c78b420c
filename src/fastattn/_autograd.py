"""Short ways through PyTorch for plain tensors: its own cost more than a short kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), str, bool, int, float, torch.device))


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether a call has to go through a Function; a transform may hide that it does."""
    if forward_ad._current_level >= 0:  # the Function says that it has no forward derivative
        return True
    if not torch.is_grad_enabled():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    return transformed or any(x.requires_grad for x in tensors)


def apply(function: type[Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, for a function with ``setup_context`` and no defaults.

    ``Function.apply`` inspects the Python signature first, to fill in defaults: 30 µs a call. The
    compiler and ``torch.func`` have their own ways and keep them; but where nothing needs a
    gradient the compiler would give ``forward`` a context that it does not take.
    """
    if torch.compiler.is_compiling() and not any(
        isinstance(x, Tensor) and x.requires_grad for x in arguments
    ):
        return function.forward(*arguments)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(Function, function).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]


def call(operator: Callable[..., Any], implementation: Callable[..., Any], *arguments: Any) -> Any:
    """A registered operator; its implementation itself where nobody asks for the boundary.

    PyTorch's dispatcher turns every argument from Python to C++ and back: 30 µs a call. Whoever
    looks at operators, a compiler, a transform, a mode or a tensor subclass, still sees one.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or not _PLAIN.issuperset(map(type, arguments))
    ):
        return operator(*arguments)
    return implementation(*arguments)
