"""The store: what was graded stays, what was not judged is graded again, many writers do not hurt."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.store import Store, request_key, schema

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
    code = WRITER.format(root=str(Path(__file__).resolve().parents[2]), path=str(path))
    writers = [subprocess.Popen([sys.executable, "-c", code, f"p{k}"]) for k in range(4)]
    assert [w.wait(60) for w in writers] == [0, 0, 0, 0]
    assert len(list(Store(path).rows())) == 160


def test_a_file_that_is_no_database_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    path.write_bytes(b"this is not a database, and long enough to be read as a header" * 20)
    with pytest.raises(UsageError, match="g.sqlite"):
        Store(path)


# The tables of the first version, as it made them.
FIRST = """
CREATE TABLE IF NOT EXISTS gradings (
    key TEXT PRIMARY KEY, policy TEXT NOT NULL, task TEXT NOT NULL, sample INTEGER NOT NULL, created REAL NOT NULL,
    infra INTEGER NOT NULL, request TEXT NOT NULL, source BLOB, outcome TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_policy ON gradings (policy, task, sample);
"""
OLD: list[tuple[int, bytes | None, Outcome]] = [
    (0, b"x", _outcome()), (1, b"\xff\x00", _outcome(Verdict.INCORRECT)), (2, None, _outcome(Verdict.MALFORMED)),
    (3, b"x", _outcome(Verdict.INFRA_FAULT)),
]  # fmt: skip


def _first_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA journal_mode=WAL;" + FIRST)
        for sample, source, outcome in OLD:
            request = {**REQUEST, "sample": sample}
            text = json.dumps(request, sort_keys=True)
            row = (
                request_key(request, source),
                "p",
                "math/softmax",
                sample,
                1000.5 + sample,
                outcome.fault is Fault.INFRA,
            )
            db.execute("INSERT INTO gradings VALUES (?,?,?,?,?,?,?,?,?)", (*row, text, source, outcome.to_json()))
        db.commit()


def _holds_all_of_the_first_version(store: Store) -> None:
    rows = list(store.records(sources=True))
    assert [(r.sample, r.source, r.outcome) for r in rows] == OLD
    assert [r.created for r in rows] == [1000.5, 1001.5, 1002.5, 1003.5]
    assert all({**r.settings, "policy": r.policy, "sample": r.sample} == {**REQUEST, "sample": r.sample} for r in rows)
    for sample, source, outcome in OLD:
        request = {**REQUEST, "sample": sample}
        known = None if outcome.fault is Fault.INFRA else outcome
        assert store.get(request_key(request, source)) == known and store.find(request) == known


def test_a_file_of_the_first_version_is_brought_up_to_date_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    _first_version(path)
    for _ in range(2):
        store = Store(path)
        _holds_all_of_the_first_version(store)
        store.close()
    store = Store(path)
    store.put(request_key({**REQUEST, "sample": 3}, b"x"), "p", 3, {**REQUEST, "sample": 3}, b"x", _outcome())
    assert store.find({**REQUEST, "sample": 3}) == _outcome() and len(list(store.rows())) == 4


def test_an_upgrade_that_is_cut_short_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "g.sqlite", []
    _first_version(path)

    def cut(text: str) -> bytes:
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return b""

    with monkeypatch.context() as patch:
        patch.setattr(schema, "pack_outcome", cut)
        with pytest.raises(KeyboardInterrupt):
            Store(path)
    _holds_all_of_the_first_version(Store(path))


def test_what_is_no_store_or_a_newer_one_is_refused_and_not_touched(tmp_path: Path) -> None:
    newer, other = tmp_path / "newer.sqlite", tmp_path / "other.sqlite"
    Store(newer).close()
    with closing(sqlite3.connect(newer)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError, match=r"newer kbx_env.*update"):
        Store(newer)
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE gradings (mark REAL)")
    before = other.read_bytes()
    with pytest.raises(UsageError, match="another program"):
        Store(other)
    assert other.read_bytes() == before


PACKED = (
    "787dc245f6824314cfc038ced02fce4f2bc94d04b79f0814c8488534edca6370b8439306884db03486a65044790cf624c837f84a640205"
    "1fac28c49711d0932cd6082226420069df7f70"
)


def _contained(old: Any, new: Any) -> bool:
    """Whether new JSON has everything of the old one, beside fields that have come since, at any depth."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(k in new and _contained(v, new[k]) for k, v in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(_contained, old, new))
    return bool(old == new)


def test_packed_outcomes_of_files_in_the_field_stay_readable() -> None:
    # If this fails, the text that outcomes are packed with was changed: no file written before could be read any more.
    kept = bytes.fromhex(PACKED)
    found = schema.unpack_outcome(kept)
    assert Outcome.from_dict(found) == _outcome(), "fields that have come since are as they were not known"
    assert _contained(found, _outcome().to_dict())
    with pytest.raises(UsageError, match="damaged"):
        schema.unpack_outcome(kept[:-9])


def test_a_source_is_kept_once_whoever_hands_it_in(tmp_path: Path) -> None:
    store, source = Store(tmp_path / "g.sqlite"), os.urandom(100_000)
    for sample in range(40):
        request = {**REQUEST, "sample": sample}
        store.put(request_key(request, source), "p", sample, request, source, _outcome())
    assert all(r.source == source for r in store.records(sources=True))
    store.close()
    assert (tmp_path / "g.sqlite").stat().st_size < 400_000


def test_the_same_source_is_known_from_another_sample_but_not_under_other_settings(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")
    full: dict[str, Any] = {
        **REQUEST, "grading": "contract", "seed": None, "timing": True, "split": "eval", "torch_ops": "strict",
        "estimate": None, "device": "cpu", "torch": "2.13.0", "triton": "3.7.1", "kbx_env": "0.1.0", "python": "3.12.1",
    }  # fmt: skip
    store.put(request_key(full, b"x"), "p", 0, full, b"x", _outcome())
    assert store.same({**full, "policy": "q", "sample": 7}, b"x") == _outcome() and store.same(full, b"y") is None
    others = {
        "grading": "paper", "seed": 0, "timing": False, "split": "train", "torch_ops": "allow", "estimate": "h200",
        "backend": "cuda", "device": "NVIDIA H200", "torch": "2.12.0", "triton": "3.6.0", "kbx_env": "0.2.0",
        "python": "3.11.7", "fingerprint": "g", "task": "math/cos", "targets": [],
    }  # fmt: skip
    for name, value in others.items():
        changed = {**full, name: value}
        assert store.same(changed, b"x") is None and store.find(changed) is None, name
        assert store.get(request_key(changed, b"x")) is None, name
    assert store.same({k: v for k, v in full.items() if k != "seed"}, b"x") is None


def test_rows_show_one_state_of_the_file_while_others_write(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")
    for sample in (0, 1):
        store.put(f"k{sample}", "p", sample, {**REQUEST, "sample": sample}, b"x", _outcome())
    seen = []
    for _, _, sample, _ in store.rows():
        seen.append(sample)
        store.put(f"new{sample}", "p", sample + 10, {**REQUEST, "sample": sample + 10}, b"x", _outcome())
    assert seen == [0, 1] and [r.sample for r in store.records()] == [0, 1, 10, 11]


def test_rows_are_chosen_and_counted_by_policy_task_and_verdict(tmp_path: Path) -> None:
    store = Store(tmp_path / "g.sqlite")
    for sample, (policy, verdict) in enumerate(
        [("p", "correct"), ("p", "incorrect"), ("q", "correct"), ("q", "correct")]
    ):
        request = {**REQUEST, "policy": policy, "sample": sample}
        store.put(f"k{sample}", policy, sample, request, b"x", _outcome(Verdict(verdict)))
    assert store.counts() == [("p", "correct", 1), ("p", "incorrect", 1), ("q", "correct", 2)]
    assert store.counts(policy="p", verdict="correct") == [("p", "correct", 1)]
    assert [r.sample for r in store.records(verdict="correct", limit=2)] == [0, 2]
    assert len(list(store.records(task="math/*"))) == 4 and not list(store.records(task="loss/*"))


def test_pruning_takes_what_was_chosen_and_gives_the_room_back(tmp_path: Path) -> None:
    path, now = tmp_path / "g.sqlite", time.time()
    store = Store(path)
    shared = os.urandom(50_000)
    for policy in ("p", "q"):
        for sample, source in enumerate((shared, os.urandom(500_000), b"lost")):
            request = {**REQUEST, "policy": policy, "sample": sample}
            outcome = _outcome(Verdict.INFRA_FAULT if source == b"lost" else Verdict.CORRECT)
            store.put(request_key(request, source), policy, sample, request, source, outcome)
    with pytest.raises(UsageError, match="needs a condition"):
        store.prune()
    assert store.prune(before=now - 1) == 0 and store.prune(before=time.time() + 1, dry_run=True) == 6
    assert store.prune(infra=True, policy="q") == 1 and len(list(store.rows())) == 5
    assert store.prune(policy="p") == 3
    assert [(r.policy, r.sample) for r in store.records()] == [("q", 0), ("q", 1)]
    assert next(store.records(sources=True)).source == shared, "what another grading needs stays"
    assert path.stat().st_size < 700_000


def test_the_log_beside_the_file_stays_short_and_a_long_reader_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "LOG", 100_000)
    store, log = Store(tmp_path / "g.sqlite"), tmp_path / "g.sqlite-wal"
    for sample in range(2):
        store.put(f"first{sample}", "p", sample, REQUEST, os.urandom(20_000), _outcome())
    reading = store.rows()
    next(reading)
    for sample in range(20):
        store.put(f"k{sample}", "q", sample, REQUEST, os.urandom(20_000), _outcome())
    assert log.stat().st_size > 200_000 and len(list(reading)) == 1
    for sample in range(60):
        store.put(f"l{sample}", "q", sample, REQUEST, os.urandom(20_000), _outcome())
    assert log.stat().st_size < 200_000 and len(list(store.rows())) == 82


def test_tables_that_another_makes_between_two_reads_are_no_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    made: list[bool] = []

    class Between(sqlite3.Connection):
        def execute(self, sql: str, *more: object) -> sqlite3.Cursor:  # type: ignore[override]
            if "application_id" in sql and not made:
                found = super().execute(sql, *more)
                made.append(True)
                Store(path)
                return found
            return super().execute(sql, *more)

    with closing(sqlite3.connect(path, timeout=60, isolation_level=None, factory=Between)) as db:
        with pytest.raises(UsageError, match="locked"), pytest.MonkeyPatch.context() as patch:
            # Who reads holds the new file: the other waits. It would wait for ever here, in one thread.
            patch.setattr(schema, "connect", lambda p: sqlite3.connect(p, timeout=0, isolation_level=None))
            patch.setattr(schema.time, "sleep", lambda _: None)
            schema._version(db, path)
        assert schema._version(db, path) == 0, "nothing of the other's is seen by halves"


MIXED = """
import sys
sys.path.insert(0, {root!r})
from kbx_env.outcome import Cases, Outcome, Stage, Verdict
from kbx_env.store import Store, request_key
store = Store({path!r})
for i in range(int(sys.argv[2])):
    for policy, source in (("shared", b"the same of all"), (sys.argv[1], b"%d" % i)):
        request = {{"policy": policy, "task": "t", "sample": i}}
        outcome = Outcome("t", Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", message=sys.argv[1], cases=Cases(1, 1))
        store.put(request_key(request, source), policy, i, request, source, outcome)
    print(i, flush=True)
"""


def test_a_writer_killed_among_others_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "g.sqlite"
    code = MIXED.format(root=str(Path(__file__).resolve().parents[2]), path=str(path))

    def start(name: str, rows: int) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code, name, str(rows)], stdout=subprocess.PIPE, text=True)

    doomed, writers = start("doomed", 100_000), [start(f"p{k}", 150) for k in range(3)]
    assert doomed.stdout is not None
    for _ in range(20):
        doomed.stdout.readline()
    doomed.kill()
    told = 20 + len([line for line in doomed.stdout.read().splitlines(keepends=True) if line.endswith("\n")])
    for writer in writers:
        writer.communicate(timeout=60)
    assert [w.returncode for w in writers] == [0, 0, 0] and doomed.wait() == -9
    found = [(r.policy, r.sample) for r in Store(path).records()]
    assert len(found) == len(set(found)), "each key once"
    for k in range(3):
        assert [s for p, s in found if p == f"p{k}"] == list(range(150))
    # What the killed one had said to be written is there; the row in its hands may be or not.
    assert len([1 for p, _ in found if p == "doomed"]) in (told, told + 1)
    assert {s for p, s in found if p == "shared"} >= set(range(max(150, told)))
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM sources WHERE id NOT IN (SELECT source FROM gradings)").fetchone() == (
            0,
        )
