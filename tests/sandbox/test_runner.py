"""What a submission can do to its host, its grader and its own verdict: nothing."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kbx_env.grading.grader import Grader
from kbx_env.outcome import Verdict
from kbx_env.sandbox import firewall
from kbx_env.sandbox.runner import _fresh_memory_filled

HEAD = """
import torch
import triton
import triton.language as tl
import math
"""
BODY = (
    HEAD
    + """
def gelu_fp16(input, approximate='none'):
    {}
    return input
"""
)


def test_a_call_without_launches_finds_no_earlier_results_in_fresh_memory(monkeypatch) -> None:
    """Three kernels of a generated pack were rejected on a GPU: their ablated calls returned the results of the call before."""
    made = {
        "empty": lambda: torch.empty(64), "like": lambda: torch.empty_like(torch.ones(64)),
        "new": lambda: torch.ones(1).new_empty(64), "complex": lambda: torch.empty(64, dtype=torch.cfloat),
        "strided": lambda: torch.empty_strided((8, 8), (1, 8), dtype=torch.bfloat16),
    }  # fmt: skip
    earlier, imported = torch.are_deterministic_algorithms_enabled(), list[str]()
    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: (imported.append(name), original(name, *a, **k))[1])
    with _fresh_memory_filled():
        assert not imported, "a runner refuses most imports while the submission runs"
        assert {name: bool(make().isnan().all()) for name, make in made.items()} == dict.fromkeys(made, True)
        assert bool((torch.empty(64, dtype=torch.int8) == 127).all())
        assert bool((torch.zeros(64) == 0).all())
    assert torch.are_deterministic_algorithms_enabled() == earlier


def _grade(grader, source: str, **more):
    return grader.grade("activation/gelu_fp16", source, backend="cpu", targets=(), **{"wall": 5.0, **more})


@pytest.mark.parametrize(
    ("line", "verdict", "says"),
    [
        ("raise KeyError('boom')", Verdict.RUNTIME_ERROR, "KeyError"),
        ("raise SystemExit(0)", Verdict.RUNTIME_ERROR, "SystemExit"),
        ("torch.relu(input)", Verdict.REJECTED, "relu"),
        ("input.sum()", Verdict.REJECTED, "sum"),
        ("input + 1", Verdict.REJECTED, "add"),
        ("input.numpy()", Verdict.REJECTED, "numpy"),
        ("torch.rand(9)", Verdict.REJECTED, "rand"),
        ("[torch.randint(9, (1,)).item() for _ in range(99)]", Verdict.REJECTED, "values read back"),
        ("math.factorial(10**7)", Verdict.TIMEOUT, "wall"),
    ],
)
def test_one_line_bodies(grader, line: str, verdict: Verdict, says: str) -> None:
    outcome = _grade(grader, BODY.format(line))
    assert (outcome.verdict, says in outcome.message) == (verdict, True), outcome.message


def test_a_dead_process_is_the_submissions_fault_and_the_next_one_is_fine(grader) -> None:
    died = _grade(grader, BODY.format("torch.empty(0).as_strided((1 << 30,), (1 << 20,)).fill_(1)"))
    assert died.verdict in (Verdict.RUNTIME_ERROR, Verdict.REJECTED)
    again = _grade(grader, BODY.format("pass"))
    assert again.verdict in (Verdict.INCORRECT, Verdict.REJECTED), again.message


def test_memory_is_limited(grader) -> None:
    outcome = _grade(grader, BODY.format("torch.empty(40 << 30, dtype=torch.uint8).fill_(1)"))
    assert outcome.verdict is Verdict.RUNTIME_ERROR


def test_errors_name_the_submissions_line(grader) -> None:
    outcome = _grade(grader, HEAD + "\n\ndef gelu_fp16(input, approximate='none'):\n    return undefined_name\n")
    assert outcome.message.startswith("line 9: NameError")


def test_a_compile_error_is_named(grader) -> None:
    source = (
        HEAD
        + """
@triton.jit
def k(x, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.no_such_function(B))


def gelu_fp16(input, approximate='none'):
    k[(1,)](input, B=16)
    return input
"""
    )
    outcome = _grade(grader, source)
    assert outcome.verdict is Verdict.COMPILE_ERROR and "no_such_function" in outcome.message


def test_nothing_is_left_behind(grader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _grade(grader, BODY.format("pass"))
    assert os.listdir(tmp_path) == []


WATCHED = """
import sys, threading
from kbx_env.sandbox.runner import Runner

folder, outside = sys.argv[1:]
runner = Runner({"device": "cpu", "folder": folder, "without": ["kernel"]}, lambda request: None)
found = []

def write():
    try:
        open(outside, "w")
        found.append("written")
    except Exception as e:
        found.append(type(e).__name__)

write()
thread = threading.Thread(target=write)
thread.start()
thread.join()
print(runner.trusted, found, [rule for rule, _ in runner.log.denied])
"""


def test_a_thread_is_watched_while_the_runner_works(tmp_path: Path) -> None:
    """The audit hook is not armed for the runner's own work; a submission's thread went on unwatched meanwhile."""
    script, folder = tmp_path / "watched.py", tmp_path / "own"
    script.write_text(WATCHED)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder), str(tmp_path / "outside")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "1 ['written', 'PolicyViolation'] ['file_access']", ended.stderr[-2000:]


RAISES = """
import sys
from kbx_env.sandbox.runner import Runner

seen = []
sys.modules["seen"] = seen
runner = Runner({"device": "cpu", "folder": sys.argv[1], "without": ["kernel", "lockdown", "firewall"]}, lambda request: None)
source = b'''
import sys
def fail(large):
    raise ValueError("no")
class Tensor:
    pass
def start():
    large = Tensor()
    sys.modules["seen"].append(__import__("weakref").ref(large))
    fail(large)
start()
'''
reply, _ = runner.answer({"op": "load", "entry": "start"}, [bytearray(source)])
print(reply["ok"], reply["name"], seen[0]() is None)
"""


def test_an_error_of_the_submission_keeps_none_of_its_tensors(tmp_path: Path) -> None:
    """Its traceback had the arguments of a call: gigabytes, from a timed size that failed to the end of the grading."""
    script, folder = tmp_path / "raises.py", tmp_path / "own"
    script.write_text(RAISES)
    folder.mkdir()
    ended = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "False ValueError True", ended.stderr[-2000:]


def test_what_a_thread_tries_during_the_probe_counts() -> None:
    log = firewall.Log()
    log._probed_by = threading.get_ident()
    log.deny("torch_compute", "the probe's own")
    thread = threading.Thread(target=log.deny, args=("file_access", "a thread's"))
    thread.start()
    thread.join()
    assert log.denied == [("file_access", "a thread's")]


@pytest.mark.parametrize("name", ["signal", "setitimer"])
def test_a_handler_of_a_signal_is_refused(grader: Grader, name: str) -> None:
    """It would run in the middle of the runner's own work."""
    call = {"signal": "(14, lambda *a: None)", "setitimer": "(0, 0.01)"}[name]
    text = "lambda t: ''.join(map(chr, t.encode()))"  # the screen knows the names
    modules = f"getattr(getattr(warnings, ({text})('sys')), ({text})('modules'))[({text})('signal')]"
    source = BODY.format(f"import warnings; getattr({modules}, ({text})({name!r})){call}")
    outcome = grader.grade("activation/gelu_fp16", source, backend="cpu", targets=())
    assert outcome.verdict is Verdict.REJECTED and f"signal.{name}" in outcome.message, outcome.message
