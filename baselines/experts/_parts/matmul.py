def product(a, b, **options):
    """torch.matmul's shapes over gemm: 1-D operands are a row or a column and lose that axis in the result."""
    row, column = a.dim() == 1, b.dim() == 1
    c = gemm(a.unsqueeze(0) if row else a, b.unsqueeze(1) if column else b, **options)
    c = c.squeeze(-2) if row else c
    return c.squeeze(-1) if column else c
