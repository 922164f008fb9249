# parts: conv, moments
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    # With running statistics the normalisation is one multiplication and one addition per channel.
    return tl.maximum(acc * gain + bias, 0.0) if MODE else acc + bias


@triton.jit
def activation(z, where, s, t, MODE: tl.constexpr):
    return tl.maximum(z, 0.0)


@triton.jit
def _fold(
    mean, var, weight, shift, bias, gain, offset, O, eps,
    WEIGHT: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """gain = weight / sqrt(var + eps) and offset = (bias - mean) * gain + shift of every channel."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < O
    g = 1.0 / tl.sqrt_rn(tl.load(var + o, mask=inside, other=1.0) + eps)
    if WEIGHT:
        g = g * tl.load(weight + o, mask=inside)
    centre = -tl.load(mean + o, mask=inside)
    if BIAS:
        centre += tl.load(bias + o, mask=inside)
    centre = centre * g
    if SHIFT:
        centre += tl.load(shift + o, mask=inside)
    tl.store(gain + o, g, mask=inside)
    tl.store(offset + o, centre, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_fold_any = triton.jit(_fold.fn, do_not_specialize=[p.name for p in _fold.params if not p.is_constexpr])


def fused_relu_batch_norm_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, running_mean=None, running_var=None,
    bn_weight=None, bn_bias=None, training=False, momentum=0.1, eps=1e-5, inplace=False,
):  # fmt: skip
    if not training:
        O = weight.shape[0]
        vectors = (running_mean, running_var, bn_weight, bn_bias, bias)
        vectors = [None if v is None else v.contiguous() for v in vectors]
        gain, offset = torch.empty((2, O), dtype=torch.float32, device=weight.device)
        kernel = _fold_any if input.numel() < 1 << 17 else _fold
        kernel[(triton.cdiv(O, 256),)](
            *vectors, gain, offset, O, eps, WEIGHT=bn_weight is not None,
            SHIFT=bn_bias is not None, BIAS=bias is not None, BLOCK=256,
        )  # fmt: skip
        return conv(input, weight, offset, stride, padding, dilation, groups, gain=gain, mode=1)
    y = conv(input, weight, bias, stride, padding, dilation, groups)
    N, C, H, W = y.shape
    running = None if running_mean is None else (running_mean, running_var)
    return standardise(y, N, C, H * W, eps, bn_weight, bn_bias, running, momentum)
