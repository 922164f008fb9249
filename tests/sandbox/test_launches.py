"""What Triton has gcc build is built quickly, and works."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import build

from kbx_env.sandbox.launches import quick_launchers

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
