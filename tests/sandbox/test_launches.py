"""What Triton has gcc build is built quickly, and works; a build that begins with TTIR is the one that begins with the source;
autotuners keep nothing of calls without launches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import build
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kbx_env.sandbox import launches
from kbx_env.sandbox.fake_cuda.driver import TARGETS
from kbx_env.sandbox.launches import quick_launchers
from kbx_env.sandbox.specialised import ttir_of

SOURCE = """
#include <Python.h>
static PyObject *seven(PyObject *self, PyObject *args) { return PyLong_FromLong(7); }
static PyMethodDef methods[] = {{"seven", seven, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "quick_seven", NULL, -1, methods};
PyMODINIT_FUNC PyInit_quick_seven(void) { return PyModule_Create(&module); }
"""


def test_a_launcher_is_built_with_little_optimisation(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path))
    asked: list[list[str]] = []
    call = build.subprocess.check_call
    monkeypatch.setattr(build.subprocess, "check_call", lambda c, **k: (asked.append(list(c)), call(c, **k))[1])
    monkeypatch.setattr(build, "_build", build._build)  # put back afterwards
    quick_launchers()
    made = build.compile_module_from_src(src=SOURCE, name="quick_seven", ccflags=["-w"])
    assert made.seven() == 7
    levels = [flag for flag in asked[0] if flag.startswith("-O")]
    assert levels[-1] == "-O1" and "-w" in asked[0]


def test_another_tritons_build_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: str, source: str) -> str:
        return name

    monkeypatch.setattr(build, "_build", other)
    quick_launchers()
    assert build._build is other


@triton.jit
def _scaled_sum(x, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    v = tl.load(x + o, mask=o < n)
    tl.store(y, tl.sum(v * 1.5 + 1.0, 0))


@pytest.mark.parametrize("launch_options", [{}, {"num_warps": 8, "num_stages": 2}])
def test_a_build_from_ttir_is_that_from_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, launch_options: dict[str, int]
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    target = TARGETS["sm_90"]
    backend = make_backend(target)
    options = backend.parse_options(launch_options)
    signature, constants = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 1024}
    attrs = {(0,): [["tt.divisibility", 16]]}
    compiled = launches._Compiled(_scaled_sum, signature, constants, attrs, options, launch_options)
    text = ttir_of(ASTSource(_scaled_sum, signature, constants, attrs), backend, options, target)
    rows = [launches._build("_scaled_sum", compiled, "sm_90", ttir) for ttir in ("", text)]
    for row in rows:
        assert row.pop("ok") and row.pop("seconds") > 0 and row["registers"] and row["warps"] == options.num_warps
    assert rows[0] == rows[1]


def test_ttir_that_does_not_compile_is_a_failed_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compiled = launches._Compiled(_scaled_sum, {}, {}, {}, None, {})
    row = launches._build("_scaled_sum", compiled, "sm_90", "module { nonsense }")
    assert not row["ok"] and row["error"]


def test_times_of_calls_without_launches_are_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[Any, Any]] = []

    def check_disk_cache(tuner: Autotuner, key: Any, configs: Any, measure: Any) -> bool:
        measure()
        kept.append(dict(tuner.configs_timings))
        return False

    for owner, name in ((Autotuner, "run"), (JITFunction, "run")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(Autotuner, "check_disk_cache", check_disk_cache)
    interceptor = launches.Interceptor("cpu")
    interceptor.install()
    launched: list[int] = []

    def kernel(x: Any, n: Any, B: Any) -> None: ...

    configs = [triton.Config({"B": b}) for b in (16, 32)]
    times = iter([2.0, 1.0])
    tuner = Autotuner(
        SimpleNamespace(fn=kernel, run=lambda *a, **k: launched.append(k["B"])), ["x", "n", "B"], configs, ["n"], None, None,
        do_bench=lambda *a, **k: [next(times)] * 3, cache_results=True,
    )  # fmt: skip
    for mode in ("ablate", "dry"):
        interceptor.mode = mode
        tuner.run("x", 5)
        assert not kept and not tuner.cache and tuner.cache_results
    interceptor.mode = "run"
    tuner.run("x", 5)
    assert [list(timings.values()) for timings in kept] == [[[2.0] * 3, [1.0] * 3]] and launched[-1] == 32
