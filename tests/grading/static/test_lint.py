"""Errors that are certain from the text: all of them are listed at once, and none in a source that works."""

from __future__ import annotations

import ast
import dataclasses
import random
import symtable
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbx_env.envs.prompt import feedback
from kbx_env.grading.static.denylist import Violations
from kbx_env.grading.static.lint import MAX_SLIPS, slips
from kbx_env.grading.static.screen import screen
from kbx_env.grading.static.syntax_tree import ParsedSource, walked
from kbx_env.outcome import LAUNCHLESS, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, load_tasks

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n"
KERNEL = HEAD + "@triton.jit\ndef k(x, y, n, B: tl.constexpr):\n    i = tl.arange(0, B)\n    {}\n\n\ndef f(x, y):\n    {}\n"
ZOO = Path(__file__).parents[2] / "zoo/honest"


def parsed_from(source: str) -> ParsedSource:
    tree = ast.parse(source)
    return ParsedSource(tree, symtable.symtable(source, "source", "exec"), *walked(tree))


def told(source: str) -> tuple[str, ...]:
    parsed = parsed_from(source)
    return slips(parsed, Violations(parsed).names)


def found(source: str) -> list[str]:
    """The slips of a source without lines, and without the one about launches."""
    return [s.partition(": ")[2] for s in told(source) if s != LAUNCHLESS]


def inside(kernel: str = "tl.store(y + i, tl.load(x + i))", host: str = "k[(1,)](x, y, 4, B=4, num_warps=2)") -> list[str]:
    return found(KERNEL.format(kernel, host))


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("tl.store(y + i, tl.tanh(tl.load(x + i)))", "module 'triton.language' has no attribute 'tanh'"),
        ("tl.store(y + i, tl.math.tanh(tl.load(x + i)))", "module 'triton.language.math' has no attribute 'tanh'"),
        ("tl.store(y + i, tl.load(x + i, scope='gpu'))", "tl.load(...): got an unexpected keyword argument 'scope'"),
        ("tl.store(y + i, tl.rand(i))", "tl.rand(...): missing a required argument: 'offset'"),
        ("tl.store(y + i, tl.max(i, 0, keepdim=True))", "tl.max(...): got an unexpected keyword argument 'keepdim'"),
        ("tl.store(y + i, tl.load(x + j))", "name 'j' is not defined"),
        ("tl.store(y + i, 0 if 0 <= n < 3 else 1)", "several comparisons in one (a < b < c) are not supported in kernels"),
        ("while n > 1: continue", "continue is not supported in kernels"),
        ("tl.store(y + i, f(x, y))", "f is called in a kernel and lacks @triton.jit"),
    ],
)  # fmt: skip
def test_what_no_kernel_can_do_is_found(kernel: str, says: str) -> None:
    assert inside(kernel) == [says]


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("k(x, y, 4, B=4)", "k is a kernel and called without a grid: k[grid](...)"),
        ("k[(1,)](x, y, B=4)", "k(...): missing a required argument: 'n'"),
        ("k[(1,)](x, y, 4, 4, 4)", "k(...): too many positional arguments"),
        ("f[(1,)](x, y)", "f[...](...) launches a function that is no kernel; it lacks @triton.jit"),
        ("return tl.zeros((4,), tl.float32)", "tl.zeros works in kernels alone and is called in a host function"),
        ("return f(x)", "f(...): missing a required argument: 'y'"),
        ("return triton.empty(4)", "module 'triton' has no attribute 'empty'"),
        ("k[(grid(4),)](x, y, 4, B=4)", "name 'grid' is not defined"),
    ],
)  # fmt: skip
def test_what_no_host_function_can_do_is_found(host: str, says: str) -> None:
    assert inside(host=host) == [says]


def test_all_are_told_once_by_line() -> None:
    text = KERNEL.format("tl.store(y + a, tl.tanh(b) + a)", "k(x, y)")
    assert [t.partition(":")[0] for t in told(text)] == ["line 8"] * 3 + ["line 12"]
    assert len(told("".join(f"a{n}\n" for n in range(50)))) == MAX_SLIPS
    assert found("from triton import Tensor\ndef f(x: Tuple): return x\n") == [
        "cannot import 'Tensor' from 'triton'", "name 'Tuple' is not defined"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    from triton.language import tanh\nexcept ImportError:\n    tanh = None\n",
        "try:\n    from triton.language import tanh\nexcept* ImportError:\n    tanh = None\n",
        "import contextlib\nwith contextlib.suppress(NameError): whatever\n",
        "import triton.language as tl\nHAS = hasattr(tl, 'tanh')\ndef f(x): return tl.tanh if HAS else None\n",
        "import triton\nV = triton.__version__\ndef f(x): return triton.new if V > '9' else None\n",
        "import triton\ntriton.mine = 1\nprint(triton.mine)\n",
        "import torch\ndef f(x):\n    with torch.backends.cudnn.flags(enabled=True): return torch.backends.cudnn.allow_tf32\n",
        "def f(x):\n    y: Tensor = x\n    if x:\n        z: Optional[int]\n    return y\n",
        "import triton.language as tl\ndef f(x):\n    match x:\n        case [tl, *_]: return tl.foo()\n",
        "def f(a, b): return a\ndef g():\n    from math import pow as f\n    return f(1)\n",
        "import triton\ndef k(x): pass\nj = getattr(triton, 'jit')(k)\ndef f(x): j[(1,)](x)\n",
        "class A:\n    name = __qualname__\n",
        "import triton\nif triton.__version__ > '9':\n    from triton import new\n",
        "import triton.language as tl\ng = tl.tanh if hasattr(tl, 'tanh') else None\n",
        "from __future__ import annotations\ndef f(x: Unknown): return x\n",
        "def f(tl):\n    return tl.anything(1)\n",
        "import math\nmath = f = None\nprint(math.nothing)\n",
        "from math import *\ndef f(x): return sqrt(whatever)\n",
        "def f():\n    global g\n    g = 1\n    return g\ndef h(): return g\n",
        "import triton\ndef k(x): tl.load(x)\nimport triton.language as tl\nj = triton.jit(k)\n",
        "def f(*a, **k): return f(1, *a, z=2, **k)\n",
        "def f(a):\n    for i in a:\n        if i: print(y)\n        y = i\n",
        "for i in range(2):\n    if i: print(y)\n    y = i\n",
        "def f(x, a):\n    for _ in a: del x\n    return x\n",
        "def f(g):\n    try: g()\n    except ValueError as e: g(lambda: e)\n",
        "def f(a):\n    any((y := x) for x in a)\n    return y\n",
        "[y := x for x in '12']\nprint(y)\n",
        "x: int = 1\nprint(__annotations__)\n",
        "def f(x: 'Unknown'): return x\n",
        "f = lambda n: n and f(n - 1)\n",
        "import triton\nimport triton.language as tl\n@triton.autotune([], [])\n@triton.jit\ndef k(x, B: tl.constexpr): pass\n"
        "def f(x): k[(1,)](x)\n",
    ],
)  # fmt: skip
def test_what_is_not_certain_is_left_out(source: str) -> None:
    assert found(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n" + "".join(f"    {'if' if n == 0 else 'elif'} x == {n}: pass\n" for n in range(900)),
        KERNEL.format("\n    ".join(f"a = {' + '.join(['x'] * 40)} < n < {k}" for k in range(1000)), "return x"),
        f"def g({', '.join(f'a{n}=0' for n in range(3000))}): pass\ndef f():\n" + "".join(f"    g(a{n}=1)\n" for n in range(3000)),
        "x = " + "(1 if " * 80 + "g(" + "1, " * 20000 + ")" + " else 2)" * 80 + "\n",
        "@a\n" * 20000 + "class A:\n" + "    b\n" * 20000,
        "if a:\n" + "    x = 1\n" * 25000,
        "\n".join(f"a{n}" for n in range(9000)) + "\ndef f():\n    global " + ", ".join(f"b{n}" for n in range(90000)) + "\n",
        "f = [" + "lambda x: y, " * 9000 + "]\n",
    ],
)  # fmt: skip
def test_long_sources_take_no_longer_than_their_length(source: str) -> None:
    began = time.process_time()
    parsed = parsed_from(source)
    slips(parsed, Violations(parsed).names)
    assert time.process_time() - began < 5, "a tenth of that, if the machine is idle"


def test_what_is_told_is_bounded_and_decides_nothing() -> None:
    assert all(len(s) < 250 for s in told("a" * 9999))
    deep = KERNEL.format(f"tl.store(y, x < {' + '.join(['n'] * 380)} < n)", "k[(1,)](x, y, 4, B=4)")
    assert screen(load_task("math/erf"), deep.replace("def f(x, y)", "def erf(input_tensor)")).verdict is None


def test_nothing_is_found_in_honest_oddities() -> None:
    for path in sorted(ZOO.rglob("*.py")):
        assert told(path.read_text()) == (), path.name


@pytest.mark.parametrize(
    ("source", "launchless"),
    [
        ("def f(x): return x\n", True),
        (KERNEL.format("tl.store(y + i, tl.load(x + i))", "return x"), True),
        (KERNEL.format("k[(1,)](x, y, n, B)", "return x"), True),  # itself alone
        (KERNEL.format("pass", "k[(1,)](x, y, 4, B=4)"), False),
        (KERNEL.format("pass", "run = k\n    run[(1,)](x, y, 4, B=4)"), False),
        ("import triton\ndef k(x): pass\nj = triton.jit(k)\ndef f(x): j[(1,)](x)\n", False),
        ("import triton\ndef made():\n    @triton.jit\n    def k(x): pass\n    return k\ndef f(x): made()[(1,)](x)\n", False),
        ("import triton\nclass A:\n    @triton.jit\n    def k(x): pass\ndef f(x): A.k[(1,)](x)\n", False),
        ("import triton\nmine = (triton.jit,)[0]\n@mine\ndef k(x): pass\ndef f(x): k[(1,)](x)\n", False),
    ],
)  # fmt: skip
def test_whether_a_source_launches_anything(source: str, launchless: bool) -> None:
    assert (LAUNCHLESS in told(source)) == launchless


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(x):\n    return x\ndef g():\n    return x\n", [4]),
        ("def f():\n    return [a for a in '12']\ndef g(): return a\n", [3]),
        ("class A:\n    x = 1\n    y = x\n    def f(self): return x\n", [4]),
        ("def f(x):\n    def g(): return x\n    return g\n\nprint(x)\n", [5]),
        ("def f():\n    global x\n    x = 1\ndef g(): return x\ndef h(y): return y\ndef i(): return y\n", [6]),
    ],
)  # fmt: skip
def test_a_name_is_undefined_only_where_no_scope_around_binds_it(source: str, lines: list[int]) -> None:
    names = [s for s in told(source) if s != LAUNCHLESS]
    assert [int(s.partition(":")[0][5:]) for s in names] == lines


def test_pyflakes_knows_every_name_that_is_reported() -> None:
    checker = pytest.importorskip("pyflakes.checker")
    messages = pytest.importorskip("pyflakes.messages")
    experts = [expert_source(t.id) or "" for t in load_tasks()]
    zoo = [p.read_text() for p in sorted(ZOO.parent.rglob("*.py"))]
    files = Path(__file__).parents[3].joinpath("baselines/experts").rglob("*.py")
    for source in (*experts, *zoo, *(p.read_text() for p in files)):  # the files alone lack the parts that they begin with
        ours = {(int(s.partition(":")[0][5:]), s) for s in told(source) if " is not defined" in s}
        found = [m for m in checker.Checker(ast.parse(source)).messages if isinstance(m, messages.UndefinedName)]
        theirs = {(m.lineno, f"line {m.lineno}: name {m.message_args[0]!r} is not defined") for m in found}
        assert ours <= theirs


TRAIN = [t for t in load_tasks(split="train") if expert_source(t.id)]


@given(st.sampled_from(TRAIN), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_name_that_nobody_knows_is_always_found(task, seed: int) -> None:
    """Wherever it stands in a kernel that is right."""
    text = expert_source(task.id) or ""
    names = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    node = random.Random(seed).choice(names)
    lines = text.split("\n")
    line = lines[node.lineno - 1].encode()
    lines[node.lineno - 1] = (line[: node.end_col_offset] + b"_nowhere" + line[node.end_col_offset :]).decode()
    assert any(f"name {node.id + '_nowhere'!r} is not defined" in s for s in found("\n".join(lines)))


def test_the_screen_tells_them_of_what_it_can_read() -> None:
    task = load_task("math/erf")
    text = HEAD + "def erf(input_tensor):\n    return nothing(input_tensor)\n"
    assert screen(task, text).slips == (LAUNCHLESS, "line 6: name 'nothing' is not defined")
    assert screen(task, text + "def").slips is None
    listed = screen(task, "import os\n" + text).slips
    assert listed is not None and listed[0] == LAUNCHLESS and listed[2] == "line 7: name 'nothing' is not defined"
    assert listed[1].startswith("line 1: import os"), "an import that fails is certain too"


def test_feedback_tells_those_that_the_compiler_has_not_come_to() -> None:
    some = ("line 3: name 'a' is not defined", "line 9: name 'b' is not defined")
    outcome = Outcome("math/erf", Verdict.COMPILE_ERROR, Stage.COMPILE, "cpu", "contract", Fault.POLICY, slips=some,
                      message="line 30: NameError: name 'a' is not defined")  # fmt: skip
    lines = feedback(outcome).splitlines()
    assert "Also fails where it is reached: line 9: name 'b' is not defined" in lines and not any("line 3:" in x for x in lines)
    long = dataclasses.replace(outcome, slips=(LAUNCHLESS,), message="x" * 9999)
    assert f"Also fails where it is reached: {LAUNCHLESS}" in feedback(long).splitlines()
    assert Outcome.from_dict(outcome.to_dict()) == outcome
    # Of a kernel that ran, those are parts that nothing reached.
    wrong = Outcome("math/erf", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, slips=some)
    assert "Also fails" not in feedback(wrong)
