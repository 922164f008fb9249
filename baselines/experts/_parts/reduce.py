import torch
import triton
import triton.language as tl

# The expert's file defines, with a state of one or more tensors:
#   value(v, w, i, inside, s, t, MODE) -> tuple: the state of elements v (and w) at index i; neutral where not inside
#   combine(*a, *b): two states into one; a tuple, or a tensor where the state is one tensor
#   finish(state, n, s, t, MODE) -> tuple: the results of n reduced elements
# and calls reduce().


# The expert's own function may be called min or max, wherever in the module it stands.
def _least(*values):
    return sorted(values)[0]


def _most(*values):
    return sorted(values)[-1]


@triton.jit
def _tile(x, w, c, r, n, columns, rn, r1, r2, cn, c1, c2, s, t, TWICE: tl.constexpr, WIDE: tl.constexpr,
          SPLIT_R: tl.constexpr, MODE: tl.constexpr):  # fmt: skip
    """The state of every element of one tile; r counts the reduced elements, c the kept ones."""
    inside = (r < n) & (c < columns)
    i = r
    if WIDE:
        c = c.to(tl.int64)
        r = r.to(tl.int64)
    at = r * r2
    if SPLIT_R:
        at = r // rn * r1 + r % rn * r2
    at = at + (c // cn * c1 + c % cn * c2)
    v = tl.load(x + at, mask=inside)
    u = v
    if TWICE:
        u = tl.load(w + at, mask=inside)
    return value(v, u, i, inside, s, t, MODE)


@triton.jit
def _reduce(x, w, ys, n, columns, rn, r1, r2, cn, c1, c2, chunk, splits, s, t, TWICE: tl.constexpr, WIDE: tl.constexpr,
            SPLIT_R: tl.constexpr, ROWS: tl.constexpr, DONE: tl.constexpr, COUNT: tl.constexpr, MODE: tl.constexpr,
            BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Results of BC kept elements (DONE), or their states over one chunk of the reduced axes."""
    # The axis that is contiguous in memory is the last of the tile: neighbouring threads read neighbouring elements.
    first = tl.program_id(0).to(tl.int64) * BC if WIDE else tl.program_id(0) * BC
    kept = first + tl.arange(0, BC)
    c = kept[:, None] if ROWS else kept[None, :]
    step = tl.arange(0, BN)
    step = step[None, :] if ROWS else step[:, None]
    begin = tl.program_id(1).to(tl.int64) * chunk if WIDE else tl.program_id(1) * chunk
    end = tl.minimum(n, begin + chunk)
    state = _tile(x, w, c, begin + step, end, columns, rn, r1, r2, cn, c1, c2, s, t, TWICE, WIDE, SPLIT_R, MODE)
    for r0 in range(begin + BN, end, BN):
        new = _tile(x, w, c, r0 + step, end, columns, rn, r1, r2, cn, c1, c2, s, t, TWICE, WIDE, SPLIT_R, MODE)
        if COUNT == 1:
            state = (combine(state[0], new[0]),)
        else:
            state = combine(*state, *new)
    state = tl.reduce(state, 1 if ROWS else 0, combine)
    where = kept
    if DONE:
        state = finish(state, n, s, t, MODE)
    else:
        where = kept.to(tl.int64) * splits + tl.program_id(1)
    for k in tl.static_range(len(ys)):
        tl.store(ys[k] + where, state[k].to(ys[k].dtype.element_ty), mask=kept < columns)


@triton.jit
def _join(parts, ys, n, columns, s, t, MODE: tl.constexpr, SPLITS: tl.constexpr, BC: tl.constexpr):
    """Results from the states of all chunks; a chunk without elements left a neutral one."""
    kept = tl.program_id(0) * BC + tl.arange(0, BC)
    at = kept[:, None].to(tl.int64) * SPLITS + tl.arange(0, SPLITS)[None, :]
    state = tl.reduce([tl.load(p + at, mask=(kept < columns)[:, None]) for p in parts], 1, combine)
    state = finish(state, n, s, t, MODE)
    for k in tl.static_range(len(ys)):
        tl.store(ys[k] + kept, state[k].to(ys[k].dtype.element_ty), mask=kept < columns)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_reduce_any = triton.jit(_reduce.fn, do_not_specialize=[p.name for p in _reduce.params if not p.is_constexpr])


def _merged(sizes, strides):
    """At most two (size, stride) that walk all the elements in order, or None where more would be needed."""
    axes = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return [(1, 0)] * (2 - len(axes)) + axes if len(axes) <= 2 else None


def power_below(n):
    """The largest power of two that is at most n (1 for n < 1)."""
    return 1 << _most(0, int(n).bit_length() - 1)


def walk(x, dims):
    """(x or a copy, reduced axes, kept axes): each two pairs (size, stride), the second one the faster."""
    reduced = [d for d in range(x.dim()) if d in dims]
    kept = [d for d in range(x.dim()) if d not in dims]
    for y in (x, None):
        # More than two runs of axes cannot be walked: reorder them in a copy.
        y = x.permute(kept + reduced).contiguous().permute(_inverse(kept + reduced)) if y is None else y
        r = _merged([y.shape[d] for d in reduced], [y.stride(d) for d in reduced])
        c = _merged([y.shape[d] for d in kept], [y.stride(d) for d in kept])
        if r is not None and c is not None:
            break
    return y, r, c


def _inverse(order):
    return [order.index(d) for d in range(len(order))]


def reduce(x, dims, *, states, dtypes, w=None, keepdim=False, outs=None, s=0.0, t=0.0, mode=0, few=None):
    """Reduce x (with w, of the same shape, beside it) over dims: None or () for all, an int, or several.

    states are the dtypes of the state, dtypes those of the results, outs tensors to fill instead of new ones; s, t and
    mode go to the expert's functions; few says whether the task's tensors are small (see _reduce_any), by default x
    decides. Returns a tuple of results.
    """
    dims = range(x.dim()) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
    dims = {d % _most(1, x.dim()) for d in dims}
    shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
    ys = [torch.empty(shape, dtype=d, device=x.device) for d in dtypes]
    if outs is not None:
        ys = [o if o.is_contiguous() else y for o, y in zip(outs, ys, strict=True)]
    if w is not None and w.stride() != x.stride():
        x, w = x.contiguous(), w.contiguous()
    before = x
    x, ((rm, r1), (rn, r2)), ((cm, c1), (cn, c2)) = walk(x, dims)
    if w is not None:
        w = walk(w, dims)[0] if x is not before else w
    n, columns = rm * rn, cm * cn
    if columns:
        wide = _most(rm * abs(r1) + rn * abs(r2) + cm * abs(c1) + cn * abs(c2), n * columns) >= 2**31 - 2**16
        # A single kept element, or reduced axes with the smaller stride: threads run along the reduced ones.
        rows = n > 1 and (columns == 1 or r2 <= c2)
        elements = 4096 if len(states) < 3 and _most(*(d.itemsize for d in states)) < 8 else 2048
        if rows:
            BN = _least(elements, triton.next_power_of_2(n))
            BC = _least(_most(1, 1024 // BN), power_below(columns // 512))
        else:
            BC = _least(128, triton.next_power_of_2(columns))
            BN = _most(1, _least(elements // BC, triton.next_power_of_2(n)))
        few = x.numel() < 1 << 17 if few is None else few
        if few:
            BN, BC = (256, 4) if rows else (32, 32)
        grid = triton.cdiv(columns, BC)
        # Few long reductions do not fill a GPU: split each and join the states.
        splits = 1
        if grid < 264 and n >= 8 * BN:
            splits = _least(
                2048, power_below((2112 if rows else 1056) // grid), triton.next_power_of_2(triton.cdiv(n, 4 * BN))
            )
        splits = 1 if few else splits
        chunk = triton.cdiv(triton.cdiv(n, splits), BN) * BN if splits > 1 else n
        # A row that fits gets about 16 elements a thread, and no more warps than it needs: joining them costs time.
        warps = _most(1, BN * BC // 512) if rows and splits == 1 else 8 if BN * BC >= 2048 else 4
        parts = ys
        if splits > 1:
            parts = [torch.empty((columns * splits,), dtype=d, device=x.device) for d in states]
        kernel = _reduce_any if few else _reduce
        kernel[(grid, splits)](
            x, x if w is None else w, tuple(parts), n, columns, _most(1, rn), r1, r2, _most(1, cn), c1, c2, chunk,
            splits, s, t, TWICE=w is not None, WIDE=wide, SPLIT_R=rm > 1, ROWS=rows, DONE=splits == 1,
            COUNT=len(states), MODE=mode, BN=BN, BC=BC, num_warps=warps,
        )  # fmt: skip
        if splits > 1:
            BC = _most(1, 1024 // splits)
            _join[(triton.cdiv(columns, BC),)](
                tuple(parts), tuple(ys), n, columns, s, t, MODE=mode, SPLITS=splits, BC=BC, num_warps=4
            )
    if outs is not None:
        for o, y in zip(outs, ys, strict=True):
            if o is not y:
                o.copy_(y)
        return tuple(outs)
    return tuple(ys)
