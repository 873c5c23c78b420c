"""Launch a Triton kernel without Triton's own dispatch, which costs more than a short kernel runs.

Triton looks at every argument of every launch to find the variant that it compiled for them. Our
kernels fix the types of sizes and strides and take tensors that start at multiples of 16 bytes, so
the caller's options alone decide the variant: it is looked up by them, and launched as Triton and
inductor do it, by addresses, and without the hooks of a profiler where none is set. What a launch
needs beside tensors may be kept by their shapes (:func:`planned`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

_variants: dict[tuple[str, Hashable, int], tuple[Any, tuple[int, ...], tuple[Any, ...], Any]] = {}
_planners: list[Any] = []


class Plan(NamedTuple):
    """What a launch needs beside tensors."""

    grid: tuple[int, int, int]
    numbers: tuple[Any, ...]
    options: Any
    splits: int = 1


def planned(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """Keep plans by what they are made of, shapes and dtypes: to make one anew takes as long as a
    short kernel runs."""
    kept = lru_cache(maxsize=1024)(make)
    _planners.append(kept)
    return kept


def forget() -> None:
    """Variants and plans, for whoever changes what ``_tuning`` says."""
    _variants.clear()
    for kept in _planners:
        kept.cache_clear()


def launch(
    kernel: str,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    options: Hashable,
    constants: Callable[[str, Any], dict[str, Any]],
) -> None:
    """Launch a kernel on the device of its first argument, on the current stream.

    Args:
        kernel: ``module.name``: the function ``{name}_kernel`` in ``fastattn.kernels.{module}``.
        arguments: Its arguments up to its first constant.
        options: Everything that dtypes, None arguments and constants are a function of.
        constants: From kernel and options, the constants and Triton's own options (num_warps,
            ...); called when no variant is known. Those that the kernel does not have are left out.
    """
    device = arguments[0].get_device()
    variant = _variants.get((kernel, options, device))
    if variant is None or device != torch.cuda.current_device():
        _first_launch(kernel, grid, arguments, options, constants)
        return
    compiled, tensors, constants_after, hooks = variant
    if getattr(hooks.launch_enter_hook, "calls", hooks.launch_enter_hook):  # a chain, or one
        compiled[grid](*arguments, *constants_after)
    else:
        addresses = list(arguments)  # of a tensor Triton asks the driver whether it is on a GPU
        for i in tensors:
            addresses[i] = arguments[i].data_ptr()
        compiled.run(
            *grid,
            torch._C._cuda_getCurrentRawStream(device),
            compiled.function,
            compiled.packed_metadata,
            *(None, None, None),  # for hooks: what is launched, before it, after it
            *addresses,
            *constants_after,
        )


def _first_launch(
    kernel: str,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    options: Hashable,
    constants: Callable[[str, Any], dict[str, Any]],
) -> None:
    """Launch through Triton, which compiles, and remember the variant."""
    device = arguments[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, arguments, options, constants)
        return
    module, name = kernel.split(".")
    function = getattr(import_module(f"fastattn.kernels.{module}"), f"{name}_kernel")
    chosen = constants(kernel, options)
    parameters = function.arg_names[len(arguments) :]
    launch_options = {k: x for k, x in chosen.items() if k.startswith("num_") or k == "maxnreg"}
    compiled = function[grid](*arguments, **{k: chosen[k] for k in parameters}, **launch_options)
    if compiled is not None:  # None from the interpreter, and where launches are only recorded
        from triton.knobs import runtime

        rest = tuple(chosen[k] for k in parameters)
        tensors = tuple(i for i, x in enumerate(arguments) if isinstance(x, Tensor))
        _variants[kernel, options, device] = compiled, tensors, rest, runtime


def dense(x: Tensor) -> Tensor:
    """As kernels need it: last dimension contiguous, start aligned, rows less than 2^24 apart, and
    not the view of what it is the negative of."""
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and x.stride(-2) < 16777216 and not x.is_neg():
        return x
    return x.clone(memory_format=torch.contiguous_format)


@overload
def whole(x: Tensor) -> Tensor: ...


@overload
def whole(x: Tensor | None) -> Tensor | None: ...


def whole(x: Tensor | None) -> Tensor | None:
    """Contiguous, and its start aligned."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0 and not x.is_neg()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def merged(x: Tensor) -> Tensor:
    """``(b, h, n, width)`` as :func:`heads_inside` lays it out, which a kernel relies on.

    It is, unless a hook on saved tensors (``save_on_cpu``, say) has given another in its place.
    """
    _, h, n, width = x.shape
    if x.stride() == (n * h * width, width, h * width, 1) and x.data_ptr() % 16 == 0:
        return x
    return heads_inside(x, width).copy_(x)


def heads_inside(x: Tensor, width: int) -> Tensor:
    """New memory for ``(b, h, n, width)``, laid out (b, n, h, width): merging heads is a view."""
    b, h, n, _ = x.shape
    step = h * width
    return x.new_empty_strided((b, h, n, width), (n * step, width, step, 1))
