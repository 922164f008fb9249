# parts: eliminate


def det(A):
    return determinant(A)
