import triton


def in_place(kernel, changed, read, *numbers, **switches):
    """One elementwise kernel over the ``changed`` tensors, which it also writes, and the ``read`` ones."""
    n = changed[0].numel()
    if n:
        # Tensors with gaps are updated in a dense copy and copied back.
        dense = [t.contiguous() for t in changed]
        others = [t.contiguous() for t in read]
        kernel[(triton.cdiv(n, 1024),)](*dense, *others, n, *numbers, **switches, BLOCK=1024, num_warps=4)
        for old, new in zip(changed, dense, strict=True):
            if not old.is_contiguous():
                old.copy_(new)
    return changed
