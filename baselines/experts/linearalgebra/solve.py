# parts: eliminate


def solve(A, B):
    return eliminate(A, B)
