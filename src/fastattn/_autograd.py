"""Short ways through PyTorch for plain tensors: its own cost more than a short kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function, forward_ad

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), str, bool, int, float, torch.device))


def needs_gradient(*arguments: Any) -> bool:
    """Whether a call has to go through a Function; a transform may hide that it does."""
    if forward_ad._current_level >= 0:  # the Function says that it has no forward derivative
        return True
    if not torch.is_grad_enabled():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    return transformed or any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


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
    if torch.compiler.is_compiling():
        return function.apply(*_distinct(arguments))
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(Function, function).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]


def _distinct(arguments: Sequence[Any]) -> list[Any]:
    """No tensor twice, which the compiler refuses: the second time it is a view of itself."""
    found: list[Any] = []
    for x in arguments:
        twice = isinstance(x, Tensor) and any(x is y for y in found)
        found.append(x.view_as(x) if twice else x)
    return found


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


def call_once(operator: Callable[..., Any], implementation: Callable[..., Any], *given: Any) -> Any:
    """The same of a backward pass, which has no derivative: ``torch.func`` would take it for zero.

    Raises:
        RuntimeError: A transform of ``torch.func`` around the one that asks needs it.
    """
    if differentiated_twice(*given):
        raise RuntimeError(
            "trying to differentiate twice what has one derivative: take backend='torch', where "
            "the op has more"
        )
    return call(operator, implementation, *given)


def differentiated_twice(*arguments: Any) -> bool:
    """Whether two transforms of ``torch.func`` differentiate one of these."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return any(isinstance(x, Tensor) and _levels(x) > 1 for x in arguments)


def _levels(x: Tensor) -> int:
    """How many transforms differentiate it."""
    functorch, count = torch._C._functorch, 0
    while functorch.is_functorch_wrapped_tensor(x):
        count += functorch.is_gradtrackingtensor(x) and x.requires_grad
        x = functorch.get_unwrapped(x)
    return count


def one_by_one(library: torch.library.Library, *names: str) -> None:
    """Let ``torch.vmap`` run operators once for each index of its axis, and stack what they give.

    Their Functions set ``generate_vmap_rule``, which passes an axis on to the operators.
    """
    for name in names:
        operator = getattr(torch.ops.fastattn, name).default
        torch.library.register_vmap(f"fastattn::{name}", _Loop(operator), lib=library)


class _Loop:
    def __init__(self, operator: Callable[..., Any]) -> None:
        self.operator = operator

    def __call__(self, info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        def at(i: int) -> Any:
            pairs = zip(arguments, in_dims, strict=True)
            return self.operator(*(x.select(d, i) if isinstance(d, int) else x for x, d in pairs))

        found = [at(i) for i in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        stacked = [torch.stack(parts) for parts in zip(*found, strict=True)]
        return type(found[0])(stacked), type(found[0])([0] * len(stacked))
