"""The tables of a recipe, for samples of any length: what every row sees, and who sees a column.

    rows      a tile of rows: what it draws at random, its entries, its items
    columns   a tile of columns: who drew them, their entries, their items

Letters: HEADS with patterns of their own, ROWS blocks in the longest sample; of a row FIRST and
LAST global blocks of the sequence, LEFT and RIGHT of its own, DRAWN at random. HASHED are seed and
layer. Tables are laid out as ``kernels.block_sparse`` reads them. Entries of row i begin
at ROOM·i; behind those of all rows are the numbers from 0 to ROWS, which is what global rows and
columns see, in PARTS parts of LIMIT entries. Items of what does not exist have the row ROWS.
"""

import triton
import triton.language as tl

from fastattn.kernels.linear_attention_parts import launched


@triton.jit
def mix(x):
    """The finaliser of SplitMix64; see ``ops.block_sparse_plans``."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def step(x, counter):
    return mix((x ^ counter.to(tl.uint64)) + 0x9E3779B97F4A7C15)


@triton.jit
def bounds(length, FIRST, LAST, ROWS):
    """The length, where the first global blocks end, and where the last ones begin."""
    length = tl.minimum(length, ROWS).to(tl.int32)
    first = tl.minimum(length, FIRST)
    return length, first, tl.maximum(length - LAST, first)


@triton.jit
def put_item(items_ptr, PLANE, at, row, start, count, slot, leads, mask):
    tl.store(items_ptr + at, row, mask=mask)
    tl.store(items_ptr + PLANE + at, start, mask=mask)
    tl.store(items_ptr + 2 * PLANE + at, count, mask=mask)
    tl.store(items_ptr + 3 * PLANE + at, slot, mask=mask)
    tl.store(items_ptr + 4 * PLANE + at, leads, mask=mask)


@triton.jit
def put_globals(
    items_ptr, PLANE, merges_ptr, MERGES, length, first, last, start, ROWS, LIMIT, CUTS, PARTS,
    CAUSAL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Items and merges of global rows, or columns: one part of ``LIMIT`` entries after the other,
    of what begins at ``start``."""
    for which in range(0, CUTS):
        row = tl.where(which < first, which, last + which - first)
        low, high = 0, length
        if CAUSAL:
            if COLUMNS:
                low = row
            else:
                high = tl.minimum(row + 1, length)
        total = tl.where(row < length, high - low, 0)
        cut = total > LIMIT
        for part_0 in range(0, PARTS, BLOCK):
            part = part_0 + tl.arange(0, BLOCK)
            begin = part * LIMIT
            real = begin < total
            slot = tl.where(cut & real, which * PARTS + part, -1)
            count = tl.where(real, tl.minimum(total - begin, LIMIT), 0)
            leads = (part == 0).to(tl.int32)
            put_item(items_ptr, PLANE, which * PARTS + part, tl.where(real, row, ROWS),
                     start + low + begin, count, slot, leads, part < PARTS)  # fmt: skip
        tl.store(merges_ptr + which, tl.where(cut, row, ROWS))
        tl.store(merges_ptr + MERGES + which, which * PARTS)
        tl.store(merges_ptr + 2 * MERGES + which, tl.where(cut, tl.cdiv(total, LIMIT), 0))


@launched
def rows_kernel(
    lengths_ptr, drawn_ptr, blocks_ptr, items_ptr, merges_ptr,
    HASHED,
    HEADS, ROWS, FIRST, LAST, LEFT, RIGHT, DRAWN, ROOM, ITEMS, LIMIT, CUTS, PARTS,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of = tl.program_id(0).to(tl.int64)
    head = of % HEADS
    length, first, last = bounds(tl.load(lengths_ptr + of // HEADS), FIRST, LAST, ROWS)
    planes = tl.num_programs(0).to(tl.int64)
    items_ptr += of * ITEMS
    merges_ptr += of * CUTS
    drawn_ptr += of * ROWS * DRAWN
    blocks_ptr += of * (ROWS * ROOM + ROWS)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < ROWS
    here = (row >= first) & (row < last)  # neither global nor behind the end

    start = tl.maximum(row - LEFT, first)
    end = tl.minimum(row + RIGHT + 1, last)
    if CAUSAL:
        end = tl.minimum(end, row + 1)
    end = tl.maximum(end, start)
    at = row * ROOM
    for x in range(0, FIRST):
        tl.store(blocks_ptr + at + x, x + tl.zeros_like(row), mask=here & (x < first))
    at += first
    for x in range(0, LEFT + RIGHT + 1):
        tl.store(blocks_ptr + at + x, start + x, mask=here & (start + x < end))
    at += end - start

    # Floyd's algorithm over the blocks in [first, start) and in [end, last)
    before = start - first
    free = before + last - end
    state = step(step(HASHED.to(tl.uint64), head + tl.zeros_like(row)), row)
    for i in range(0, DRAWN):
        limit = free - DRAWN + i + 1
        high = (step(state, i + tl.zeros_like(row)) >> 32).to(tl.int64)
        chosen = ((high * tl.maximum(limit, 0)) >> 32).to(tl.int32)
        taken = row < 0
        for j in range(0, i):
            other = tl.load(drawn_ptr + row * DRAWN + j, mask=inside, other=-1)
            taken = taken | (other == chosen)
        chosen = tl.where(taken, limit - 1, chosen)
        tl.store(drawn_ptr + row * DRAWN + i, tl.where(limit > 0, chosen, -1), mask=inside)
        tl.debug_barrier()
    for i in range(0, DRAWN):
        chosen = tl.load(drawn_ptr + row * DRAWN + i, mask=inside, other=-1)
        block = tl.where(chosen < before, first + chosen, end + chosen - before)
        real = here & (chosen >= 0)
        tl.store(blocks_ptr + at, block, mask=real)
        tl.store(drawn_ptr + row * DRAWN + i, tl.where(real, block, -1), mask=inside)
        at += real.to(tl.int32)
    if not CAUSAL:
        for x in range(0, LAST):
            real = here & (last + x < length)
            tl.store(blocks_ptr + at + x, last + x + tl.zeros_like(row), mask=real)
        at += length - last
    tl.store(blocks_ptr + ROWS * ROOM + row, row, mask=inside)

    plane = planes * ITEMS
    is_global = (row < length) & (here == 0)
    count = tl.where(here, at - row * ROOM, 0)
    none, one = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), 1, tl.int32)
    put_item(items_ptr, plane, CUTS * PARTS + row, tl.where(is_global, ROWS, row), row * ROOM,
             count, none, one, inside)  # fmt: skip
    if tl.program_id(1) == 0:
        put_globals(items_ptr, plane, merges_ptr, planes * CUTS, length, first, last,
                    ROWS * ROOM, ROWS, LIMIT, CUTS, PARTS, CAUSAL, False, BLOCK)  # fmt: skip


@launched
def columns_kernel(
    lengths_ptr, drawn_ptr, blocks_ptr, items_ptr, merges_ptr, sorted_ptr,
    HEADS, ROWS, FIRST, LAST, LEFT, RIGHT, DRAWN, ROOM, ITEMS, LIMIT, CUTS, PARTS,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The entries of column j begin ROOM·j behind as many as were drawn from columns before it."""
    of = tl.program_id(0).to(tl.int64)
    length, first, last = bounds(tl.load(lengths_ptr + of // HEADS), FIRST, LAST, ROWS)
    planes = tl.num_programs(0).to(tl.int64)
    items_ptr += of * ITEMS
    merges_ptr += of * CUTS
    drawn_ptr += of * ROWS * DRAWN
    sorted_ptr += of * ROWS * DRAWN
    numbers = ROWS * (ROOM + DRAWN)
    blocks_ptr += of * (numbers + ROWS)
    low = tl.program_id(1) * BLOCK
    column = low + tl.arange(0, BLOCK)
    inside = column < ROWS
    here = (column >= first) & (column < last)

    # of all draws those from these columns, in their order, to where none from others come
    draws = ROWS * DRAWN
    before = tl.zeros((CHUNK,), tl.int32)
    for place in range(0, draws, CHUNK):
        index = place + tl.arange(0, CHUNK)
        block = tl.load(drawn_ptr + index, mask=index < draws, other=-1)
        before += ((block >= 0) & (block < low)).to(tl.int32)
    earlier = tl.sum(before, 0)
    own = 0
    for place in range(0, draws, CHUNK):
        index = place + tl.arange(0, CHUNK)
        block = tl.load(drawn_ptr + index, mask=index < draws, other=-1)
        mine = ((block >= low) & (block < low + BLOCK)).to(tl.int32)
        to = earlier + own + tl.cumsum(mine, 0) - mine
        tl.store(sorted_ptr + to, index, mask=mine > 0)
        own += tl.sum(mine, 0)
    tl.debug_barrier()
    times = tl.zeros((BLOCK,), tl.int32)
    for place in range(0, own, FEW):
        index = place + tl.arange(0, FEW)
        which = tl.load(sorted_ptr + earlier + index, mask=index < own, other=0)
        block = tl.load(drawn_ptr + which, mask=index < own, other=-1)
        times += tl.sum((block[None, :] == column[:, None]).to(tl.int32), 1)
    start = column * ROOM + earlier + tl.cumsum(times, 0) - times

    at = start
    if not CAUSAL:
        for x in range(0, FIRST):
            real = here & (x < first)
            tl.store(blocks_ptr + at, x + tl.zeros_like(column), mask=real)
            at += real.to(tl.int32)
    nearest = tl.maximum(column if CAUSAL else column - RIGHT, first)
    furthest = tl.minimum(column + LEFT + 1, last)
    for x in range(0, LEFT + RIGHT + 1):
        real = here & (nearest + x < furthest)
        tl.store(blocks_ptr + at, nearest + x, mask=real)
        at += real.to(tl.int32)
    for place in range(0, own, FEW):
        index = place + tl.arange(0, FEW)
        which = tl.load(sorted_ptr + earlier + index, mask=index < own, other=0)
        block = tl.load(drawn_ptr + which, mask=index < own, other=-1)
        same = (block[None, :] == column[:, None]).to(tl.int32)
        to = at[:, None] + tl.cumsum(same, 1) - same
        row = (which // tl.maximum(DRAWN, 1))[None, :] + tl.zeros_like(to)
        tl.store(blocks_ptr + to, row, mask=same > 0)
        at += tl.sum(same, 1)
    for x in range(0, LAST):
        real = here & (last + x < length)
        tl.store(blocks_ptr + at, last + x + tl.zeros_like(column), mask=real)
        at += real.to(tl.int32)
    tl.store(blocks_ptr + numbers + column, column, mask=inside)

    plane = planes * ITEMS
    is_global = (column < length) & (here == 0)
    none, one = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), 1, tl.int32)
    put_item(items_ptr, plane, CUTS * PARTS + column, tl.where(is_global, ROWS, column), start,
             tl.where(here, at - start, 0), none, one, inside)  # fmt: skip
    if tl.program_id(1) == 0:
        put_globals(items_ptr, plane, merges_ptr, planes * CUTS, length, first, last,
                    numbers, ROWS, LIMIT, CUTS, PARTS, CAUSAL, True, BLOCK)  # fmt: skip
