# parts: gemm, rmsnorm_gelu


def fused_bmm_rmsnorm_gelu_dropout(
    input1, input2, normalized_shape, dropout_p=0.1, eps=1e-5, training=True, approximate="none", *, out=None
):
    return product_rmsnorm_gelu(input1, input2, dropout_p, eps, training, approximate, out)
