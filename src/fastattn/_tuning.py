"""Every number that depends on the hardware, and nothing else.

A kernel file holds no block size and a kernel never asks which GPU it runs on: it takes what it
needs from here. When a number changes, the commit says on which device it was measured.
"""

from __future__ import annotations

import math
from functools import cache

import torch


def causal_chunk(d: int) -> int:
    """Tokens per chunk of the causal torch path.

    A chunk of c tokens costs c·c scores and one (d, e) state: c near the head width keeps both,
    and so the memory per token, at O(d).
    """
    return 64 if d <= 64 else 128


def favor_part() -> int:
    """Tokens whose features exist at a time on FAVOR+'s torch path; a multiple of every chunk."""
    return 1024


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a device runs side by side; 2 stands for the interpreter on a CPU."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def linear_attention_splits(rows: int, device: torch.device) -> int:
    """Into how many splits each of ``rows`` sequences is cut: two programs a multiprocessor.

    Never a function of the length: a length that was not seen before compiles nothing.
    """
    return max(1, min(64, 2 * multiprocessors(device) // max(rows, 1)))


def linear_attention_values(d: int, dtype: torch.dtype) -> int:
    """How many columns of v one call takes, so that S (d, e) in float32 stays in registers."""
    return max(16, (2048 if dtype == torch.float32 else 8192) // _block(d))


def _block(width: int) -> int:
    """The power of two that holds a width; 16 is the least a tensor core takes."""
    return max(16, 1 << (width - 1).bit_length())


def linear_attention(
    kernel: str, d: int, e: int, dtype: torch.dtype, causal: bool
) -> dict[str, int]:
    """Tiles of a linear attention kernel: "sum_keys", "attend", "sum_queries", "grad_queries" or
    "grad_keys"."""
    block_d, block_e = _block(d), _block(e)
    wide = block_d * block_e > 64 * 64
    tokens, warps, stages = 64, 4, 3
    if wide:
        tokens, warps, stages = 32, 8, 2
    elif not causal and kernel == "attend":
        tokens, warps, stages = 128, 8, 4
    elif causal and dtype == torch.float16:
        tokens = 32
    if dtype == torch.float32:  # exact products run outside the tensor cores, in registers
        tokens, warps = min(tokens, 16 if causal else 32), 8
    return {
        "BLOCK_N": tokens,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "num_warps": warps,
        "num_stages": stages,
    }


def linear_attention_exp(kernel: str, d: int, e: int) -> dict[str, int]:
    """Tiles of a causal "exp" kernel: a chunk of c tokens costs c exponentials a feature."""
    return {
        "BLOCK_N": 32 if kernel == "sum_queries" else 16,
        "BLOCK_D": _block(d),
        "BLOCK_E": _block(e),
        "num_warps": 4,
        "num_stages": 2,
    }


@cache
def linear_attention_step(d: int, e: int) -> dict[str, int]:
    """Tiles of a decoding step: at most 4096 elements of the state a program."""
    block_d = _block(d)
    return {
        "BLOCK_D": block_d,
        "BLOCK_E": min(_block(e), max(16, 4096 // block_d)),
        "num_warps": 4,
        "num_stages": 1,
    }


@cache
def favor(kernel: str, d: int, e: int, m: int, dtype: torch.dtype) -> dict[str, int]:
    """Tiles of a FAVOR+ kernel: "sum_keys", "merge", "attend", "grad_queries", "sum_queries", "add"
    or "grad_keys".

    Measured on one H100: bfloat16, d = e = 64, m = 256.
    """
    block_d, block_e, features = _block(d), _block(e), _block(m)
    narrow = dtype == torch.bfloat16 and max(block_d, block_e) <= 64
    size = 2 if dtype == torch.bfloat16 else 4
    tokens, most, warps, stages, limit = 64, 128, 4, 3, {}
    if kernel in ("merge", "add"):
        tokens, most = 0, 32
    elif kernel == "sum_keys" and narrow and features >= 128:
        warps, limit = 8, {"maxnreg": 128}  # two programs of eight warps a multiprocessor
    elif kernel == "grad_queries":
        stages = 2  # a third stage of its three tiles would leave room for one program
    elif kernel == "grad_keys":
        most, stages = 64, 2
    if not narrow:
        tokens, most, warps, stages = min(tokens, 32), min(most, 64), 8, 2
    if dtype == torch.float32 or size * max(block_d, block_e) > 512:
        tokens, most = min(tokens, 32), min(most, 32)
    # the table stays in shared memory where two programs' fit
    hold = features * (block_d + block_e) * size <= 80 * 1024
    if kernel == "grad_keys" and features > most:
        hold = False  # all blocks in one turn need more registers than there are
    return {
        "BLOCK_M": min(features, most),
        "BLOCK_N": tokens,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "HOLD": hold,
        "LIFT": hold and narrow,
        "num_warps": warps,
        "num_stages": stages if hold or "sum" in kernel or kernel == "grad_keys" else 1,
        **limit,
    }


def favor_chunk(d: int, e: int, dtype: torch.dtype) -> int:
    """Tokens between two states of causal FAVOR+, and in a tile that reads them."""
    if dtype == torch.bfloat16:
        return 64 if max(d, e) <= 64 else 32
    return 32 if max(d, e) <= 64 else 16


def favor_causal_splits(programs: int, device: torch.device) -> int:
    """Into how many splits a sequence is cut where its states are summed, one after the other."""
    return max(1, min(64, multiprocessors(device) // max(programs, 1)))


def favor_causal_programs(n: int) -> int:
    """Into how many splits n tokens are cut where their states are known: of 128 tokens, and no
    more than the second axis of a grid holds."""
    return min(-(-n // 128), 65535)


@cache
def favor_causal(
    kernel: str, d: int, e: int, m: int, dtype: torch.dtype, before: bool
) -> dict[str, int]:
    """Tiles of a causal FAVOR+ kernel: "prepare", "lift_keys", "states", "carry", "attend",
    "lift_queries", "grad_queries", "dstates" or "grad_keys".

    Measured on one H100: bfloat16, d = e = 64, m = 256.
    """
    chunk = favor_chunk(d, e, dtype)
    tuned = chunk == 64
    least = 64 if tuned else 16  # with 32 Triton 3.6 multiplies what lies outside shared memory
    block_d, block_e, features = (max(_block(x), least) for x in (d, e, m))
    if kernel in ("prepare", "carry", "lift_keys", "lift_queries"):
        features, warps, stages = 32, 4, 1
    elif kernel in ("states", "dstates"):
        features, warps, stages = (64, 4, 4) if tuned else (min(features, chunk), 8, 1)
    else:
        most = 32 if kernel == "grad_keys" else 64  # more registers than there are
        features, warps, stages = (most, 4, 3) if tuned else (min(features, chunk), 8, 1)
        if before:  # room for the tiles of two programs
            stages = min(stages, 2)
    return {
        "BLOCK_M": features,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "BLOCK_N": 64,
        "CHUNK": chunk,
        "num_warps": warps,
        "num_stages": stages,
        # for eight warps the assembler takes 128 or even 32 by itself, and spills
        **({"maxnreg": 255} if warps == 8 else {}),
    }


@cache
def favor_step(d: int, e: int, m: int) -> dict[str, int]:
    """Tiles of a decoding step: at most 8192 elements of the state a program."""
    features = _block(m)
    return {
        "BLOCK_D": min(_block(d), max(16, 8192 // features)),
        "BLOCK_E": min(_block(e), max(16, 8192 // features)),
        "BLOCK_M": features,
        "num_warps": 8,
        "num_stages": 1,
    }


def block_sparse_part(rows: int) -> int:
    """Entries up to which a list of a block-sparse pattern is one program's; others are cut."""
    return min(64, max(16, -(-rows // 32)))


@cache
def block_sparse(
    kernel: str, d: int, e: int, size: int, dtype: torch.dtype, masked: bool = False
) -> dict[str, int]:
    """Tiles of a block-sparse kernel: "attend", "merge", "grad_queries", "grad_keys" or "add".

    Where keys are ``masked``, two words of 32 bits say which of a tile's keys are seen.
    Measured on one H100, and on one H200 where blocks are of 128: bfloat16, d = e = 64.
    """
    block_d, block_e = _block(d), _block(e)
    wide = max(block_d, block_e) > 64
    queries = keys = min(size, 64)
    warps, stages, limit = 4, 3, {}
    if kernel in ("merge", "add"):
        queries, stages = 16, 1
    elif dtype == torch.float32:  # exact products run outside the tensor cores, in registers
        queries = keys = min(size, 16 if wide else 32)
        warps, stages = 8, 2
    elif wide:
        queries = keys = min(size, 32 if kernel == "grad_keys" else 64)
        warps, stages = 8, 2
    elif dtype == torch.bfloat16 and kernel != "grad_keys":
        if size == 128:
            queries, keys, warps = 128, 128 if kernel == "attend" and not masked else 64, 8
        elif kernel == "attend":
            stages = 2
        if size == 128 or kernel == "attend":
            limit = {"maxnreg": 128}  # 16 warps a multiprocessor
    return {
        "BLOCK_Q": queries,
        "BLOCK_K": keys,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "num_warps": warps,
        "num_stages": stages,
        **limit,
    }


@cache
def block_sparse_tables(kernel: str) -> dict[str, int]:
    """Tiles of the kernels that evaluate a recipe: "rows", one a thread, or "columns"."""
    return {
        "BLOCK": 128 if kernel == "rows" else 32,
        "CHUNK": 1024,
        "FEW": 64,
        "num_warps": 4,
        "num_stages": 1,
    }


def linformer_compress_first(slots: int, device: str) -> int:
    """From how many tokens on keys and values are compressed before they are projected: it is less
    work, in more products (one H200, width 512, 256 slots: slower at 4096, 5 % faster at 8192)."""
    return slots if device == "cpu" else 32 * slots


def linformer_splits(programs: int, n: int, device: torch.device, resident: int) -> int:
    """Into how many splits n tokens are cut, of so many programs side by side on a multiprocessor:
    each costs a share of all sums, which 512 tokens are worth."""
    splits = resident * multiprocessors(device) // max(programs, 1)
    return max(1, min(64, splits, n // 512))


@cache
def linformer(
    kernel: str, d: int, e: int, slots: int, dtype: torch.dtype, own: bool
) -> dict[str, int]:
    """Tiles of a Linformer kernel: "compress", "add", "attend", "grad_slots", "grad_tokens" or
    "grad_projection".

    Measured on one H200: bfloat16, d = e = 64, 256 slots.
    """
    block_d, block_e, most = _block(d), _block(e), _block(slots)
    exact = dtype == torch.float32  # exact products run outside the tensor cores, in registers
    wide = max(block_d, block_e) > 64
    warps, stages = 8, 2
    if kernel == "add":
        return {"BLOCK": 1024, "num_warps": 4, "num_stages": 1}
    if kernel in ("compress", "grad_tokens", "grad_projection"):
        side = 32 if exact else 128
        tiles = {"BLOCK_K": min(most, side), "BLOCK_C": block_d if own else side, "BLOCK_N": side}
        summed = {"compress": "N", "grad_tokens": "K", "grad_projection": "C"}[kernel]
        tiles[f"BLOCK_{summed}"] = min(tiles[f"BLOCK_{summed}"], 32 if exact else 64)
        warps, stages = 8 if exact or max(tiles.values()) > 128 else 4, 3
    elif exact:
        tiles = {"BLOCK_Q": 16 if wide else 32, "BLOCK_K": min(most, 32)}
    elif wide:
        queries = 32 if max(block_d, block_e) == 128 else 16
        tiles = {"BLOCK_Q": queries, "BLOCK_K": min(most, 64)}
    elif kernel == "attend":
        tiles, warps, stages = {"BLOCK_Q": 64, "BLOCK_K": min(most, 256)}, 4, 3
    else:
        tiles, stages = {"BLOCK_Q": 32, "BLOCK_K": min(most, 256)}, 4
    hold = most == tiles["BLOCK_K"]
    if kernel == "attend" and not hold:
        tiles["BLOCK_K"] = min(tiles["BLOCK_K"], 128)
    return {
        **tiles,
        "HOLD": hold,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "num_warps": warps,
        "num_stages": stages,
    }


def fft_conv_on_cpu() -> tuple[int, int]:
    """Inputs up to which, and rows from which on, C++ convolves whole rows faster than torch.fft.

    Rows in windows are of their windows' length. Measured on two cores of an x86-64 server: 64
    channels and more than one sample 1.2 to 4.8 times up to here, 0.9 to 1.6 at 65536, a quarter at
    262144; with four rows half as fast.
    """
    return 32768, 5


def fft_conv_window(out: int, span: int, furthest: int, whole: int, device: str) -> int:
    """The transform of a window of 2 N inputs into which rows are cut, or 0: they stay whole.

    By the operations, a number of a transform costing its levels and four more for the memory.
    Measured on one core of an x86-64 server against whole rows of n: 64 taps 2.1 times as fast at
    n = 1024, 2.6 at 4096, 3.8 at 16384, 10 at 65536, where whole rows leave the cache; 1024 taps
    1.2 at 4096, 1.9 at 16384, 3 at 65536.

    Args:
        out: Outputs of a row.
        span: From the first lag to the last, zero included.
        furthest: The greatest lag either way.
        whole: The transform of a whole row.
        device: "cpu" takes any power of two; "cuda" has two lengths, and has not been measured.
    """
    best, found = 0.95 * whole * (math.log2(whole) + 4), 0
    sizes = [1 << i for i in range(6, whole.bit_length() - 1)] if device == "cpu" else [1024, 4096]
    for size in sizes:
        valid = 2 * size - span
        if furthest < size <= valid and 2 * size <= whole:
            cost = -(-out // valid) * size * (math.log2(size) + 4)
            if cost < best:
                best, found = cost, size
    return found


def fft_conv_workspace() -> int:
    """Floats of spectra that exist at a time of rows longer than a block transforms.

    Measured on one H200, (8, 384, 65536) forward: 48 MiB, which stay in the L2, 3.38 ms; 96 MiB
    3.12; 192 MiB 2.73, with 1.33 times the least memory of a training step. Launches of few blocks
    cost more than memory does.
    """
    return 40 << 20


def fft_conv_few_taps(gated: bool) -> int:
    """Up to how many taps a GPU convolves 16 bits faster as a matrix product than by FFT.

    Measured on one H200, (16, 768, 4096): by 256 taps, the most that it takes, 0.17 ms against
    0.26, with gradients 0.60 against 0.74; by 64 and fewer 0.08 against 0.24. With gates it takes
    64: 0.49 against 0.58, of which no record is kept.
    """
    return 64 if gated else 256


@cache
def fft_conv_most_taps(device: torch.device) -> int:
    """How many taps' matrices have room in shared memory: 256 take 120 KB of it, 128 take 72."""
    if device.type != "cuda":
        return 256
    major, minor = torch.cuda.get_device_capability(device)
    return 256 if major in (9, 10) or (major, minor) == (8, 0) else 128


@cache
def fft_conv(kernel: str, taps: int, gated: bool, aligned: bool) -> dict[str, int]:
    """Tiles of "convolve" and "correlate", for as many taps as a power of two: chunks of BLOCK_S
    see inputs in tiles of BLOCK_J, so many of which are loaded TOGETHER.

    Not measured yet. Two programs or more have room on a multiprocessor of an H100, and need no
    more registers than there are, but for one of eight warps where there are gates or where
    elements of rows that are not aligned are loaded one by one.
    """
    tiles = {"BLOCK_M": 64, "BLOCK_S": 64, "num_warps": 4}
    if gated or not aligned:
        tiles["num_warps"] = 8
    if kernel == "correlate":
        return {**tiles, "BLOCK_J": 128, "num_stages": 1 if not aligned else 2 if gated else 3}
    return {**tiles, "BLOCK_J": 64, "TOGETHER": 1 if gated else 3, "num_stages": 1}


@cache
def fft_conv_splits(blocks: int, programs: int, device: torch.device) -> int:
    """Into how many splits the blocks of rows of few taps' products are cut: a program for each of
    four places on a multiprocessor."""
    return max(1, min(blocks, 4 * multiprocessors(device) // programs))


@cache
def fft_conv_slices(
    rows: int, channels: int, length: int, backward: bool, device: torch.device
) -> int:
    """Into how many slices the rows of every channel are cut; each transforms the taps again.

    A multiprocessor has room for 12288 numbers of a transform, of gradients for 8192. A wave of
    slices takes as long as its rows and the taps, which cost 0.6 of a row, or 1.6 where they have
    gradients to be summed; one that fills fewer multiprocessors half of that, and the more of the
    other half the more it fills.
    """
    room = multiprocessors(device) * max(1, (8192 if backward else 12288) // length)

    def cost(slices: int) -> float:
        waves, rest = divmod(channels * slices, room)
        each = -(-rows // slices) + (1.6 if backward else 0.6)
        return (waves + (0.5 + 0.5 * rest / room if rest else 0)) * each

    return min(range(1, min(rows, 32) + 1), key=cost)


def dot_type(dtype: torch.dtype) -> tuple[str, str]:
    """What the tensor cores multiply, by Triton's name, and the precision of float32 products.

    float16 has no room for sums over the keys, nor for features over denominators: it goes through
    tf32, which keeps as many bits. float32 is exact.
    """
    if dtype == torch.bfloat16:
        return "bfloat16", "tf32"
    return "float32", "ieee" if dtype == torch.float32 else "tf32"


def block_sparse_dot_type(dtype: torch.dtype) -> tuple[str, str]:
    """As :func:`dot_type`, for weights of a softmax, which float16 holds."""
    if dtype == torch.float16:
        return "float16", "tf32"
    return dot_type(dtype)
