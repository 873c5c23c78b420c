"""Compile what a call would launch, for GPUs that are not here; prints one JSON line a kernel.

Run as a program, since Triton must not be in interpreter mode. The launches are recorded from the
real call, so that what is compiled is what a GPU would run: kernel, types, constants, options.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
CAPABILITIES = (80, 90, 100)
FORMS = ("exp", "packed", "state", "with", "relu", "offset")  # take no more room: on Hopper alone


def record(call: Callable[[], object]) -> list[tuple[str, str, dict, dict]]:
    """The launches of a call: module, kernel, arguments by name, options."""
    launches = []

    def run(kernel, *args, grid, warmup, **kwargs):
        named = dict(zip(kernel.arg_names, args, strict=False))
        named |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
        options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
        described = {k: v.dtype if isinstance(v, torch.Tensor) else v for k, v in named.items()}
        launches.append((kernel.fn.__module__, kernel.fn.__name__, described, options))

    original = JITFunction.run
    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def compile_one(job: tuple) -> dict:
    """What one launch needs on one target: registers, bytes of stack (spills), of shared memory."""
    label, capability, (module, name, arguments, options) = job
    kernel = getattr(__import__(module, fromlist=[name]), name)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.dtype):
            signature[parameter.name] = POINTERS[value]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            raise TypeError(f"{name}: {parameter.name} is {value}, and no constant")
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    warnings = ""
    if capability == 90:  # products in flight are Hopper's; the assembler says where it waits
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(compiled.asm["ptx"])
            file.flush()
            command = [tools / "ptxas", "-arch=sm_90a", "-v", "-o", "/dev/null", file.name]
            warnings = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout).groups()
    return {
        "call": label,
        "kernel": name,
        "capability": capability,
        "registers": int(registers),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "tensor": getattr(compiled.metadata, "tmem_size", 0),  # columns, on sm_100
        "serialised": "wgmma.mma_async instructions are serialized" in warnings,
        "options": {k: v for k, v in options.items() if isinstance(v, int)},
    }


def linear_attention_calls() -> dict[str, Callable[[], object]]:
    """Forward and backward at the widths, dtypes and forms that differ in tiles or code."""
    from fastattn.ops import linear_attention_triton as path

    def call(d, e, dtype, feature_map, causal, masked=False, packed=False, state=False):
        b = 1 if packed else 2
        q, k, v = (torch.zeros(b, 64, 4, x, dtype=dtype).transpose(1, 2) for x in (d, d, e))
        mask = torch.zeros(b, 64, dtype=torch.bool) if masked else None
        ends = torch.tensor([0, 64], dtype=torch.int32) if packed else None
        shift = torch.zeros(b, 4, d) if state and feature_map == "exp" else None
        start = (torch.zeros(b, 4, d, e), torch.zeros(b, 4, d), shift) if state else (None,) * 3
        options = (mask, ends, *start, feature_map, causal, True)
        out, kept, *_ = path._forward(q, k, v, *options)
        path._backward(out, *start[:2], q, k, v, out, kept, shift, *options)

    calls = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for d in (16, 32, 64, 128, 256):
            e = min(d, path._tuning.linear_attention_values(d, dtype))
            for causal in (False, True):
                if dtype == torch.float16 and d != 64:
                    continue
                name = f"{str(dtype)[6:]} d{d} e{e} {'causal' if causal else 'all'}"
                calls[name] = lambda a=(d, e, dtype, "elu", causal): call(*a)
    for feature_map in ("relu", "squared_relu", "identity", "exp"):
        for causal in (False, True):
            for dtype in (torch.bfloat16, torch.float16):
                name = f"{str(dtype)[6:]} {feature_map} {'causal' if causal else 'all'}"
                calls[name] = lambda a=(64, 64, dtype, feature_map, causal): call(*a)
    bf16 = torch.bfloat16
    calls["bfloat16 packed masked"] = lambda: call(64, 64, bf16, "elu", False, True, True)
    calls["bfloat16 packed causal"] = lambda: call(64, 64, bf16, "elu", True, True, True)
    calls["bfloat16 state"] = lambda: call(64, 64, bf16, "elu", True, True, state=True)
    calls["bfloat16 state exp"] = lambda: call(64, 64, bf16, "exp", True, True, state=True)
    for d, e in ((64, 64), (256, 256)):
        q, k, v = (torch.zeros(2, 4, 1, x, dtype=bf16) for x in (d, d, e))
        kv, z = torch.zeros(2, 4, d, e), torch.zeros(2, 4, d)
        for feature_map, shift in (("elu", None), ("exp", z)):
            token = (q, k, v, None, kv, z, shift, feature_map, True)
            calls[f"step {feature_map} d{d}"] = lambda a=token: path._step(*a)
    return calls


def favor_calls() -> dict[str, Callable[[], object]]:
    """Forward and backward at the widths, numbers of features, dtypes and forms that differ."""
    from fastattn.ops import favor_causal_triton as causal_path
    from fastattn.ops import favor_step_triton as step_path
    from fastattn.ops import favor_triton as path

    def inputs(d, m, dtype, masked=False, packed=False, offset=False, heads=8):
        b = 1 if packed else 2
        q, k, v = (torch.zeros(b, 64, h, d, dtype=dtype).transpose(1, 2) for h in (heads, 4, 4))
        mask = torch.zeros(b, 64, dtype=torch.bool) if masked else None
        ends = torch.tensor([0, 64], dtype=torch.int32) if packed else None
        return q, k, v, mask, ends, torch.zeros(4, m, d), torch.zeros(4, m) if offset else None

    def everywhere(*args, curvature=0.25):
        q, k, v, *options = inputs(*args)
        kept = path._forward(q, k, v, *options, 0.5, curvature)
        path._backward(kept[0], q, k, v, *kept, *options, 0.5, curvature, True)

    def causal(*args, splits=1, state=False, curvature=0.25):
        q, k, v, mask, ends, w, offsets = inputs(*args)
        b, m, d = q.shape[0], *w.shape[1:]
        start = (None,) * 3
        if state:
            start = (torch.zeros(b, 4, m, d), *torch.zeros(2, b, 4, m))
        found = path._tuning.favor_causal_splits
        path._tuning.favor_causal_splits = lambda *_: splits
        try:
            out, table, lifted, kept, *end = causal_path._forward(
                q, k, v, mask, ends, w, offsets, *start, 0.5, curvature
            )
            shift = end[2] if end else None
            about = (out, table, lifted, kept, shift, mask, ends, w, *start, 0.5, curvature, True)
            causal_path._backward(out, *start[:2], q, k, v, *about)
        finally:
            path._tuning.favor_causal_splits = found

    def step(d, m, dtype):
        q, k, v, mask, _, w, _ = inputs(d, m, dtype, True)
        q, k, v = (x[:, :, :1] for x in (q, k, v))
        state = (torch.zeros(2, 4, m, d), *torch.zeros(2, 2, 4, m))
        step_path._step(q, k, v, mask[:, :1].contiguous(), w, None, *state, 0.5, 0.25)

    calls = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((16, 16), (64, 64), (64, 256), (64, 512), (256, 128), (256, 512)):
            name = f"{str(dtype)[6:]} d{shape[0]} m{shape[1]}"
            calls[name] = lambda a=(*shape, dtype): everywhere(*a)
            calls[f"{name} causal"] = lambda a=(*shape, dtype): causal(*a)
    bf16 = torch.bfloat16
    everything = (64, 256, bf16, True, True, True)
    calls["bfloat16 causal with everything"] = lambda: causal(*everything, splits=2)
    calls["bfloat16 causal with a state"] = lambda: causal(64, 256, bf16, state=True)
    calls["bfloat16 causal relu"] = lambda: causal(64, 256, bf16, curvature=None)
    calls["bfloat16 packed masked"] = lambda: everywhere(64, 256, bf16, True, True)
    calls["bfloat16 masked offset"] = lambda: everywhere(64, 256, bf16, True, False, True)
    for d, m in ((64, 256), (256, 512)):
        calls[f"bfloat16 step d{d} m{m}"] = lambda a=(d, m, bf16): step(*a)
    return calls


def block_sparse_calls() -> dict[str, Callable[[], object]]:
    """Forward and backward at the block sizes, widths, dtypes and forms that differ."""
    from fastattn.ops import BlockLayout
    from fastattn.ops import block_sparse_triton as path
    from fastattn.ops.block_sparse_tables import tables

    def call(size, d, dtype, everything=False, causal=False):
        n = 20 * size
        q, k, v = (torch.zeros(2, n, h, d, dtype=dtype).transpose(1, 2) for h in (8, 4, 4))
        mask = torch.eye(20, dtype=torch.bool)
        mask[-1] = mask[:, 0] = True  # long enough to be cut
        weight = torch.zeros(20, 20) if everything else None
        layout = BlockLayout.from_dense(mask, size, log_weight=weight, causal=causal)
        about = (None,) * 3
        if everything:
            words = torch.zeros(2, 2 * -(-n // 64), dtype=torch.int32)
            about = (words, torch.tensor([n, n], dtype=torch.int32), torch.tensor(1))
        rows, columns = tables(layout, q.device)
        numbers = (size, causal, 0.125, 0.1 if everything else 0.0)
        out, lse = path._forward(q, k, v, *about, *rows, *numbers)
        path._backward(out, q, k, v, out, lse, *about, *rows, *columns, *numbers)

    calls = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (16, 32, 64, 128):
            for d in (16, 64, 128, 256):
                name = f"{str(dtype)[6:]} d{d} block{size}"
                calls[name] = lambda a=(size, d, dtype): call(*a)
    bf16 = torch.bfloat16
    calls["bfloat16 causal"] = lambda: call(64, 64, bf16, causal=True)
    calls["bfloat16 everything"] = lambda: call(64, 64, bf16, everything=True)
    lengths = torch.tensor([4, 5])
    recipes = BlockLayout.bigbird(4096), BlockLayout.sliding_window(4096, causal=True)
    calls["tables"] = lambda: [tables(x, torch.device("cpu"), lengths) for x in recipes]
    return calls


def linformer_calls() -> dict[str, Callable[[], object]]:
    """Forward and backward at the numbers of slots, widths, dtypes and forms that differ."""
    from fastattn.ops import linformer_triton as path

    def call(slots, d, dtype, own=False, everything=False):
        q, k = (torch.zeros(2, 600, h, d, dtype=dtype).transpose(1, 2) for h in (8, 4))
        proj = torch.zeros(*((8,) if own else ()), slots, 640, dtype=dtype)
        hidden = torch.zeros(2, 600, dtype=torch.bool) if everything else None
        off = torch.zeros(2, slots, dtype=torch.bool) if everything else None
        for other in ((None, None), (k, proj)):
            kept, *more = path._compress(k, proj, *other, hidden, 8 if own else 4)
            dslots = kept, more[0] if more else None
            path._compress_backward(*dslots, k, proj, *other, hidden, *(True,) * 4)
        out, lse = path._attend(q, kept, kept, off, 0.125)
        path._attend_backward(out, q, kept, kept, off, out, lse, 0.125)

    calls = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for d in (16, 64, 128, 256):
            for slots in (16, 64, 256, 512):
                name = f"{str(dtype)[6:]} d{d} slots{slots}"
                calls[name] = lambda a=(slots, d, dtype): call(*a)
    bf16 = torch.bfloat16
    calls["bfloat16 own"] = lambda: call(256, 64, bf16, True)
    calls["bfloat16 everything"] = lambda: call(256, 64, bf16, True, True)
    return calls


def fft_conv_calls() -> dict[str, Callable[[], object]]:
    """Forward and backward at the numbers of taps, dtypes and forms that differ."""
    from fastattn.ops import fft_conv_triton as path

    def call(taps, dtype, n=4096, first=0, everything=False):
        u = torch.zeros(2, 4, n, dtype=dtype)
        skip, gate = (torch.zeros(4), u) if everything else (None, None)
        given = (u, torch.zeros(2, taps), skip, gate, gate)
        y = path._forward(*given, first, n)
        path._backward(y, *given, first, [x is not None for x in given])

    calls = {}
    for dtype in (torch.bfloat16, torch.float16):
        for taps in (1, 16, 64, 128, 256):
            calls[f"{str(dtype)[6:]} taps{taps}"] = lambda a=(taps, dtype): call(*a)
    bf16 = torch.bfloat16
    calls["bfloat16 odd"] = lambda: call(100, bf16, n=1001)
    calls["bfloat16 widest"] = lambda: call(256, bf16, first=-100)
    calls["bfloat16 everything"] = lambda: call(64, bf16, first=-28, everything=True)
    return calls


FAMILIES = {
    "linear_attention": linear_attention_calls,
    "favor": favor_calls,
    "block_sparse": block_sparse_calls,
    "linformer": linformer_calls,
    "fft_conv": fft_conv_calls,
}


def main() -> None:
    family, *chosen = sys.argv[1:]
    launches = {}  # each once, under the first call that has it
    for label, call in FAMILIES[family]().items():
        if not chosen or any(f" {words}" in f" {label}" for words in chosen):
            for launch in record(call):
                launches.setdefault(repr(launch), (label, launch))
    jobs = [
        (label, capability, launch)
        for label, launch in launches.values()
        for capability in CAPABILITIES
        if capability == 90 or not any(form in label for form in FORMS)
    ]
    with ProcessPoolExecutor() as pool:
        for found in pool.map(compile_one, jobs, chunksize=4):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
