# parts: eliminate


def determinant_lu(A, *, pivot=True, out=None):
    return determinant(A, pivot, out)
