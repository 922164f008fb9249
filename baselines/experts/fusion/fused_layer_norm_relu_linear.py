# parts: gemm, layer_norm
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    return tl.maximum(acc + bias, 0.0)


def fused_layer_norm_relu_linear(input, weight, bias=None, normalized_shape=None, eps=1e-5, elementwise_affine=True):
    z = gemm(input.reshape(-1, input.shape[-1]), weight.mT, bias).view(*input.shape[:-1], weight.shape[0])
    L = 1
    for size in (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape:
        L *= size
    return layer_norm_rows(z, L, eps)
