# parts: eliminate


def fused_cholesky_solve(A, b):
    # Elimination of a positive definite matrix needs no pivoting, and it is what A = L L^T does but for a scaling.
    return eliminate(A, b, pivot=False)
