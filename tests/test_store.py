"""The store: what was graded stays, what was not judged is graded again, many writers do not hurt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.store import Store, request_key

REQUEST = {
    "policy": "p",
    "task": "math/softmax",
    "sample": 0,
    "backend": "cpu",
    "targets": ["sm_90"],
    "fingerprint": "f",
}


def _outcome(verdict: Verdict = Verdict.CORRECT) -> Outcome:
    fault = {Verdict.CORRECT: None, Verdict.INFRA_FAULT: Fault.INFRA}.get(verdict, Fault.POLICY)
    cases = Cases(2, 2) if fault is None else None
    return Outcome("math/softmax", verdict, Stage.CORRECT, "cpu", "contract", fault, cases=cases)


def _put(store: Store, outcome: Outcome, source: bytes = b"x") -> str:
    key = request_key(REQUEST, source)
    store.put(key, "p", 0, REQUEST, source, outcome)
    return key


def test_an_outcome_comes_back_equal_after_reopening(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")
    key = _put(store, _outcome())
    store.close()
    again = Store(tmp_path / "g.sqlite")
    assert again.get(key) == _outcome() and again.get("other") is None
    assert [(p, t, s) for p, t, s, _ in again.rows("p")] == [("p", "math/softmax", 0)]
    assert list(again.rows("q")) == []


def test_an_infrastructure_fault_is_no_hit_and_never_replaces_a_verdict(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")
    key = _put(store, _outcome(Verdict.INFRA_FAULT))
    assert store.get(key) is None and store.find(REQUEST) is None
    _put(store, _outcome())
    _put(store, _outcome(Verdict.INFRA_FAULT))
    found = store.get(key)
    assert found is not None and found.correct and len(list(store.rows())) == 1


def test_whatever_decides_a_verdict_changes_the_key() -> None:
    key = request_key(REQUEST, b"x")
    assert request_key({**REQUEST, "targets": ("sm_90",)}, b"x") == key, "a tuple and a list are the same request"
    assert request_key(dict(reversed(REQUEST.items())), b"x") == key
    changed = [{**REQUEST, k: "other"} for k in REQUEST]
    assert (
        len({key, request_key(REQUEST, b"y"), request_key(REQUEST, None), *(request_key(r, b"x") for r in changed)})
        == 9
    )


def test_find_ignores_the_source_but_not_the_settings(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")
    _put(store, _outcome(), b"an answer that will not come twice")
    assert store.find(REQUEST) == _outcome()
    assert store.find({**REQUEST, "backend": "cuda"}) is None and store.find({**REQUEST, "sample": 1}) is None


WRITER = """
import sys
sys.path.insert(0, {root!r})
from kbx_env.outcome import Cases, Outcome, Stage, Verdict
from kbx_env.store import Store, request_key
store = Store({path!r})
for i in range(40):
    request = {{"policy": sys.argv[1], "task": "t", "sample": i}}
    outcome = Outcome("t", Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))
    store.put(request_key(request, b""), sys.argv[1], i, request, b"", outcome)
"""


def test_several_processes_write_one_new_file(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    code = WRITER.format(root=str(Path(__file__).resolve().parents[1]), path=str(path))
    writers = [subprocess.Popen([sys.executable, "-c", code, f"p{k}"]) for k in range(4)]
    assert [w.wait(60) for w in writers] == [0, 0, 0, 0]
    assert len(list(Store(path).rows())) == 160


def test_a_file_that_is_no_database_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    path.write_bytes(b"this is not a database, and long enough to be read as a header" * 20)
    with pytest.raises(UsageError, match="g.sqlite"):
        Store(path)
