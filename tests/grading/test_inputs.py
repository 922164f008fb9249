"""Laws of whole matrices, complex values, and parameters that are lists of tensors or numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.grading import inputs
from kbx_env.protocol.wire import assembled
from kbx_env.spec import input_distributions
from kbx_env.spec.catalog import load_task
from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, T

KINDS = ("f32", "f64", "c64")


def _draw(
    law: input_distributions.Distribution, dtype: str, shape: tuple[int, ...] = (3, 8, 8), device: str = "cpu"
) -> torch.Tensor:  # fmt: skip
    from judge_helper import make

    def first(A):
        return A

    case = Case({"*": shape}, draw=law)
    value = inputs.draw(make(first, {"A": T("*", dtype)}, Close()), case, 4, device)["A"]
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


@pytest.mark.parametrize("dtype", KINDS)
def test_matrix_laws_hold_what_they_say(dtype: str) -> None:
    spd = _draw(input_distributions.SPD(0.5), dtype)
    assert torch.allclose(spd, spd.mH) and float(torch.linalg.eigvalsh(spd).min()) > 0.49
    upper = _draw(input_distributions.Triangular(), dtype)
    assert bool((upper.tril(-1) == 0).all()) and float(torch.linalg.cond(upper).max()) < 50
    assert bool((_draw(input_distributions.Triangular(upper=False), dtype).triu(1) == 0).all())
    assert float(torch.linalg.cond(_draw(input_distributions.Dominant(), dtype)).max()) < 20
    q = _draw(input_distributions.Orthogonal(), dtype, (2, 9, 5))
    assert torch.allclose(q.mH @ q, torch.eye(5, dtype=q.dtype).expand(2, 5, 5), atol=1e-5)
    s = torch.linalg.svdvals(_draw(input_distributions.Spectrum(4, 2, 1), dtype))
    assert (
        torch.allclose(s[..., :3], torch.tensor([4.0, 2, 1], dtype=s.dtype), atol=1e-5)
        and float(s[..., 3:].max()) < 1e-5
    )
    s = torch.linalg.svdvals(_draw(input_distributions.Scaled(input_distributions.Spectrum(4, 2, 1), 64), dtype))
    assert torch.allclose(s[..., :3], torch.tensor([256.0, 128, 64], dtype=s.dtype), atol=1e-3)
    h = _draw(input_distributions.Symmetric(), dtype)
    assert torch.allclose(h, h.mH)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 9), st.booleans(), st.integers(0, 1000))
def test_matrices_that_are_orthonormalised_together_have_the_factor_of_each_one(
    batch: int, columns: int, more: int, is_complex: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if is_complex else torch.float64
    x = torch.randn(batch, columns + more, columns, generator=g, dtype=dtype)
    q = inputs.orthonormalised(x)
    assert float((q.mH @ q - torch.eye(columns, dtype=dtype)).abs().max()) < 1e-13
    r = q.mH @ x
    assert float((q @ r - x).abs().max()) < 1e-12
    assert float(r.tril(-1).abs().max()) < 1e-12
    diagonal = torch.view_as_real(r.diagonal(dim1=-2, dim2=-1).to(torch.complex128))
    assert float(diagonal[..., 0].min()) > 0 and float(diagonal[..., 1].abs().max()) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 16, 16), (3, 2, 40, 24), (5, 24, 40)])
def test_a_gpu_draws_matrices_with_the_declared_singular_values(shape: tuple[int, ...]) -> None:
    value = _draw(input_distributions.Spectrum(4, 2, 1), "f64", shape, "cuda")
    wanted = torch.zeros(min(shape[-2:]), dtype=torch.float64)
    wanted[:3] = torch.tensor([4.0, 2.0, 1.0])
    assert value.shape == shape and value.is_cuda
    assert torch.allclose(torch.linalg.svdvals(value.cpu()), wanted.expand(*shape[:-2], -1), atol=1e-12)


def test_complex_symmetric_is_not_hermitian() -> None:
    h = _draw(input_distributions.Symmetric(hermitian=False), "c64")
    assert torch.allclose(h, h.mT) and not torch.allclose(h, h.mH)


def test_a_list_of_tensors_and_a_number_in_place_of_one() -> None:
    task = load_task("fusion/fused_hstack_div")
    args = assembled(inputs.draw(task, task.cases[1], 1))
    assert [t.shape for t in args["tensors"]] == [(5,), (3,), (4,)]
    mul = load_task("math/mul")
    case = next(c for c in mul.cases if c.args.get("other") == 2.5)
    assert inputs.draw(mul, case, 1)["other"] == 2.5


def test_large_integers_keep_their_low_bits() -> None:
    """Drawn through floating point, neighbours above 2**53 would be equal, and a kernel that compares floats right."""
    task = load_task("reduce/argmax")
    case = next(c for c in task.cases if c.axes["*"] == (50, 12))
    x = inputs.draw(task, case, 5)["input_tensor"]
    assert x.unique().numel() > 20 and x.float().unique().numel() == 1
