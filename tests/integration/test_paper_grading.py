"""``grading="paper"``: what the published check accepts, here as well; what attacks the grader, here neither."""

from __future__ import annotations

import pytest
from kbx_env.baselines.policy import make_policy

from kbx_env.options import GradeOptions
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import expert_source

OPTIONS = {"backend": "cpu", "targets": (), "grading": "paper"}
HEAD = "import torch\nimport torch.nn.functional as F\nimport triton\nimport triton.language as tl\n\n\n"
KERNEL = """
@triton.jit
def _exp(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.exp(tl.load(x + o, mask=o < n + 1) / 2), mask=o < n)

"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", [
    "math/cos", "index/masked_select", "linearalgebra/svd", "linearalgebra/determinant_via_qr", "fusion/fused_hardshrink_dropout",
    "fusion/fused_fractional_max_pool2d_with_relu", "fusion/fused_repeat_interleave_log_softmax", "math/erfc_sqrt", "math/fftn",
    "random/logspace", "activation/relu", "index/scatter",
])  # fmt: skip
def test_torch_itself_is_right(grader, task: str) -> None:
    """Also where shapes or errors depend on values, and where the result is torch's own random stream."""
    outcome = grader.grade(task, make_policy("eager").act({"task": task}), **OPTIONS)
    assert outcome.correct, outcome.message
    assert outcome.grading == "paper" and outcome.evidence.launches == 0 and outcome.timing is None


@pytest.mark.parametrize(("task", "word"), [
    ("activation/selu", "not within"), ("fusion/fused_sum_std", "on the host"), ("random/rand", "positional argument"),
    ("reduce/min_gelu", "not within"), ("quantization/matmul_w8a8", "rmse"),
    ("fusion/fused_pairwise_distance_normalize", "expected"),
])  # fmt: skip
def test_the_published_reference_decides_where_it_contradicts_the_text(grader, task: str, word: str) -> None:
    outcome = grader.grade(task, make_policy("eager").act({"task": task}), **OPTIONS)
    assert not outcome.correct and word in outcome.message


def test_names_of_parameters_do_not_matter_where_the_test_passes_by_position(grader) -> None:
    source = HEAD + "def cos(x):\n    return torch.cos(x)\n"
    assert grader.grade("math/cos", source, **OPTIONS).correct
    assert grader.grade("math/cos", source, backend="cpu", targets=()).verdict is Verdict.MALFORMED


def test_strides_and_reads_beyond_the_end_are_not_seen(grader) -> None:
    source = HEAD + KERNEL + (
        "def exp_sqrt(input, out=None):\n    y = torch.empty_like(input)\n    n = input.numel()\n"
        "    _exp[(triton.cdiv(n, 128),)](input, y, n, B=128)\n    return y\n"
    )  # fmt: skip
    paper = grader.grade("math/exp_sqrt", source, **OPTIONS)
    assert paper.correct and paper.evidence.launches > 0, paper.message
    assert not grader.grade("math/exp_sqrt", source, backend="cpu", targets=()).correct


def test_a_module_may_compute_while_it_is_loaded(grader) -> None:
    source = HEAD + (
        "HALF = torch.ones(4, device='cuda').cumsum(0)[1] / 4\nTWO = float(HALF) * 4\nTABLE = (torch.arange(3) + 1).tolist()\n\n\n"
        "def exp_sqrt(input, out=None):\n    return torch.exp(input * HALF) * (TWO - 1) * TABLE[0]\n"
    )  # fmt: skip
    outcome = grader.grade("math/exp_sqrt", source, **OPTIONS)
    assert outcome.correct, outcome.message


def test_far_out_of_bounds_is_an_error(grader) -> None:
    source = HEAD + KERNEL.replace("x + o", "x + (1 << 40) + o") + (
        "def exp_sqrt(input, out=None):\n    y = torch.empty_like(input)\n    _exp[(1,)](input, y, input.numel(), B=1024)\n"
        "    return y\n"
    )  # fmt: skip
    outcome = grader.grade("math/exp_sqrt", source, **OPTIONS)
    assert outcome.verdict is Verdict.RUNTIME_ERROR and "out-of-bounds" in outcome.message


@pytest.mark.parametrize(("text", "right"), [
    ("All input elements must be positive for the logarithm function to be defined.", True), ("must be positive", False),
])  # fmt: skip
def test_texts_of_exceptions_are_compared(grader, text: str, right: bool) -> None:
    source = HEAD + (
        "def fused_log_tanh(input, out=None):\n    if bool((input <= 0).any()):\n"
        f"        raise ValueError({text!r})\n    return torch.tanh(torch.log(input))\n"
    )
    outcome = grader.grade("fusion/fused_log_tanh", source, **OPTIONS)
    assert outcome.correct is right, outcome.message
    assert right or "another text" in outcome.message


def test_the_published_gate_wants_the_name_of_the_file(grader) -> None:
    source = expert_source("optimizer/Lion")
    refused = grader.grade("optimizer/Lion", source, **OPTIONS)
    assert refused.verdict is Verdict.INCORRECT and "gate" in refused.message
    assert grader.grade("optimizer/Lion", f"{source}\nLion = lion_step\n", **OPTIONS).correct


@pytest.mark.parametrize("attack", [
    "import os\n\n\ndef cos(x):\n    os.getpid()\n    return torch.cos(x)\n",
    "def cos(x):\n    getattr(torch, '_' + 'C')\n    return torch.cos(x)\n",
    "def cos(x):\n    torch.save(x, '/tmp/x')\n    return torch.cos(x)\n",
    "import random\n\n\ndef cos(x):\n    try:\n        random._os.system('true')\n    except Exception:\n        pass\n"
    "    return torch.cos(x)\n",
])  # fmt: skip
def test_attacks_on_the_grader_cost_everything(grader, attack: str) -> None:
    outcome = grader.grade("math/cos", HEAD + attack, **OPTIONS)
    assert outcome.verdict is Verdict.REJECTED and outcome.violations, outcome.message


def test_a_forbidden_import_that_nothing_uses_does_not_compile(grader) -> None:
    outcome = grader.grade("math/cos", HEAD + "import os\n\n\ndef cos(x):\n    return torch.cos(x)\n", **OPTIONS)
    assert outcome.verdict is Verdict.COMPILE_ERROR and not outcome.violations and "import os" in outcome.message, outcome.message


def test_wrong_results_are_wrong(grader) -> None:
    for body in ("torch.zeros_like(x)", "torch.cos(x) + 1e-4", "torch.cos(x).double()", "(torch.cos(x),)", "torch.cos(x)[None]"):
        assert grader.grade("math/cos", HEAD + f"def cos(x):\n    return {body}\n", **OPTIONS).verdict is Verdict.INCORRECT, body


def test_nothing_is_timed() -> None:
    assert not GradeOptions(backend="cuda", grading="paper").timed and GradeOptions(backend="cuda").timed
