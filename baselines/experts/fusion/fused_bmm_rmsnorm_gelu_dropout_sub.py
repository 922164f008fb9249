# parts: gemm, rmsnorm_gelu


def fused_bmm_rmsnorm_gelu_dropout_sub(
    input1, input2, other, normalized_shape, dropout_p=0.5, training=True, approximate="none", eps=1e-5, *, out=None
):
    return product_rmsnorm_gelu(input1, input2, dropout_p, eps, training, approximate, out, other)
