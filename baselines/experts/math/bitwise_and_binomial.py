import torch
import triton
import triton.language as tl


@triton.jit
def _sample(a, b, counts, chances, y, n, seed, count_step, chance_step, logits, COUNT: tl.constexpr, CHANCE: tl.constexpr,
            LOGITS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Inversion: walk up the distribution function until it passes one uniform number.

    COUNT and CHANCE are 0 for one number for all elements, else 1; LOGITS says what the chances are. None: the argument
    of that name tells.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n
    both = tl.load(a + e, mask=inside, other=0) & tl.load(b + e, mask=inside, other=0)
    # One number for all elements is loaded once.
    trials = tl.load(counts + e * (count_step if COUNT is None else COUNT), mask=inside, other=0).to(tl.float32)
    p = tl.load(chances + e * (chance_step if CHANCE is None else CHANCE), mask=inside, other=0.0)
    if LOGITS is None:
        p = tl.where(logits != 0, tl.sigmoid(p), p)
    elif LOGITS:
        p = tl.sigmoid(p)
    # Successes or failures, whichever are rarer: (1 - q)^100 stays far from underflow.
    q = tl.minimum(p, 1.0 - p)
    u = tl.rand(seed, e.to(tl.uint32))
    odds = q / (1.0 - q)
    term = tl.exp(trials * tl.log(1.0 - q))
    total = term
    k = tl.zeros((BLOCK,), tl.float32)
    for _ in range(tl.max(trials, 0).to(tl.int32)):
        more = (u >= total) & (k < trials)
        term = tl.where(more, term * odds * (trials - k) / (k + 1.0), term)
        total = tl.where(more, total + term, total)
        k = tl.where(more, k + 1.0, k)
    k = tl.where(p > 0.5, trials - k, k)
    tl.store(y + e, k * both.to(tl.float32), mask=inside)


# For small tensors: compiled once for all kinds of arguments, the other once more for every kind.
_sample_any = triton.jit(_sample.fn, do_not_specialize="n seed count_step chance_step logits".split())


def bitwise_and_binomial(input, other, total_count, probs=None, logits=None):
    shape, n = input.shape, input.numel()
    y = torch.empty(shape, dtype=torch.float32, device=input.device)
    chances = probs if probs is not None else logits
    one_count, one_chance = total_count.numel() == 1, chances.numel() == 1
    counts = total_count if one_count else total_count.expand(shape).contiguous()
    chances = chances if one_chance else chances.expand(shape).contiguous()
    if n:
        # An odd seed: no launch is specialised for one divisible by 16.
        seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1
        given = int(not one_count), int(not one_chance), int(logits is not None)
        kernel, (COUNT, CHANCE, LOGITS) = (_sample, given) if n >= 1 << 12 else (_sample_any, (None, None, None))
        kernel[(triton.cdiv(n, 512),)](
            input.contiguous(), other.contiguous(), counts, chances, y, n, seed, *given, COUNT=COUNT, CHANCE=CHANCE,
            LOGITS=LOGITS, BLOCK=512, num_warps=4,
        )  # fmt: skip
    return y
