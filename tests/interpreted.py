"""Triton's interpreter, for tests without a GPU: quicker, and right in 16 bits."""

from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def quicken():
    """Half of its time is for nothing: it patches its language for a launch, and in every call of a
    function within it anew, to the same; and it looks for overflows of integers, which it reports
    with ``debug`` only."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version's, and slow
    without = replace(interpreter.InterpreterOptions(), sanitize_overflow=False)
    interpreter.interpreter_builder.options = without
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        found = {id(x) for x in function.__globals__.values() if x is tl or x is tl.core}
        if found and found <= patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        restore = scope.restore
        patched.update(found)

        def restore_all():
            restore()
            patched.clear()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once


def compute_in_sixteen_bits(monkeypatch):
    """It cuts bfloat16 off, and multiplies it as the integers that hold it: here it rounds, and
    products widen both sides and are summed in float32, as tensor cores do."""
    convert = interpreter._convert_float

    def wide(x):
        return (x.astype(np.uint32) << 16).view(np.float32)

    def rounded(x, given, wanted, mode):
        if (given, wanted) == (tl.float32, tl.bfloat16):
            bits = torch.tensor(x.view(np.float32)).bfloat16().view(torch.int16)
            return bits.numpy().view(np.uint16)
        if (given, wanted) == (tl.bfloat16, tl.float32):
            return wide(x)
        return convert(x, given, wanted, mode)

    def create_dot(self, a, b, total, *about):
        a, b = (
            wide(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)
            for x in (a, b)
        )
        product = np.matmul(a, b).astype(total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    def get_bf16(self, x):
        bits = torch.tensor([x]).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "get_bf16", get_bf16, raising=False)
