"""What the throughput script tells of a run, with a grader whose times are known."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import meters, throughput

from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict


class Slow:
    """Sleeps 50 ms for a right kernel; wrong ones cost nothing, "die" ends the process."""

    def grade(self, task: str, source: bytes, **options: Any) -> Outcome:
        if os.environ.get("KBX_TEST_BEGUN"):
            Path(os.environ["KBX_TEST_BEGUN"]).touch()
        if source == b"die":
            raise SystemExit(3)
        if source == b"wrong":
            return Outcome(
                task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, seconds={"total": 0.0}
            )
        time.sleep(0.05)
        seconds = {"screen": 0.01, "compile": 0.01, "correct": 0.02, "total": 0.05}
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1), seconds=seconds)

    def close(self) -> None: ...


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], *more: str) -> dict[str, Any]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    rows = [{"task": "math/cos", "predict": s} for s in sources]
    (tmp_path / "w.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"task": "no/such", "predict": "x"}])))
    out = tmp_path / "r.json"
    asked = ["--gpus", "0", "--workload", str(tmp_path / "w.jsonl"), "--experts", "0", "--json", str(out), *more]
    assert throughput.main(asked, grader="test_throughput:Slow") == 0
    return json.loads(out.read_text())


def test_a_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    r = _run(tmp_path, monkeypatch, ["right", "wrong"], "--workers", "2", "--count", "20", "--warm", "2")
    assert r["kernels"] == len(r["requests"]) == 20 and r["workload"]["left_out"] == 1
    assert set(r["verdicts"]) == {"correct", "incorrect"} and r["gpu_busy"] is None and not r["interrupted"]
    right = r["verdicts"]["correct"]
    assert r["stages"]["correct"]["n"] == right and r["stages"]["correct"]["mean"] == pytest.approx(0.02)
    assert r["wall_seconds"] >= right * 0.05 / 2 and r["kernels_per_second"] == pytest.approx(20 / r["wall_seconds"])
    # Compilation and device time are 30 of the 50 ms of a right kernel.
    useful = right * 0.03 / (2 * r["wall_seconds"])
    assert r["shares"]["overhead"] == pytest.approx(1 - useful)
    assert sum(v for k, v in r["shares"].items() if k != "overhead") == pytest.approx(1)
    assert {x["worker"] for x in r["requests"]} == {0, 1} and r["versions"]["torch"] and r["cores"] > 0
    assert "kernels per second" in capsys.readouterr().out
    # And the simulation finds the rate again.
    check = tmp_path / "check.json"
    assert throughput.main(["--check", str(tmp_path / "r.json"), "--json", str(check)]) == 0
    assert abs(json.loads(check.read_text())["checked"][0]["error"]) < 0.2


def test_a_run_that_is_ended_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "w.jsonl").write_text(json.dumps({"task": "math/cos", "predict": "right"}))
    out, begun = tmp_path / "r.json", tmp_path / "begun"
    monkeypatch.setenv("KBX_TEST_BEGUN", str(begun))
    asked = ["--gpus", "0", "--workload", str(tmp_path / "w.jsonl"), "--experts", "0", "--json", str(out), "--count", "4000"]

    def end() -> None:
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    assert throughput.main([*asked, "--warm", "0"], grader="test_throughput:Slow") == 130
    result = json.loads(out.read_text())
    assert result["interrupted"] and result["asked"] == 4000 and len(result["requests"]) < 4000
    assert signal.getsignal(signal.SIGTERM) is not signal.default_int_handler


def test_the_cores_that_were_busy_are_those_of_this_process(tmp_path: Path) -> None:
    mine = min(os.sched_getaffinity(0))
    file = tmp_path / "stat"
    file.write_text(f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu{mine} 100 20 30 4000 50 6 7 8 0 0\ncpu9999 5 5 5 5 5 5 5 5 0 0\nintr 1\n")
    assert meters.core_seconds(file) == pytest.approx((100 + 20 + 30 + 6 + 7) / os.sysconf("SC_CLK_TCK"))
    assert meters.core_seconds(tmp_path / "none") is None
    begin = time.perf_counter()
    before = meters.core_seconds()
    while time.perf_counter() < begin + 0.3:
        pass
    after = meters.core_seconds()
    assert before is not None and after is not None and after > before


def test_what_was_lost_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = _run(tmp_path, monkeypatch, ["die", "wrong"], "--count", "4", "--warm", "0")
    assert r["kernels"] == r["verdicts"]["incorrect"] and r["verdicts"]["infra_fault"] == 4 - r["kernels"]


def test_each_kernel_several_times_and_runs_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for workers in ("1", "2"):
        r = _run(tmp_path, monkeypatch, ["right"] * 10, "--workers", workers, "--each", workers)
        assert r["kernels"] == 10 * int(workers) and r["settings"]["each"] == int(workers)
        files.append(tmp_path / f"{workers}.json")
        (tmp_path / "r.json").rename(files[-1])
    check = tmp_path / "check.json"
    assert throughput.main(["--check", *map(str, files), "--json", str(check)]) == 0
    first, second = (row["of_first"] for row in json.loads(check.read_text())["checked"])
    assert first == 1 and second > 0
    rows = json.loads(files[1].read_text())["requests"]
    assert {x["worker"] for x in rows} == {0, 1} and json.loads(files[0].read_text())["kernels"] == 10


def test_runs_are_compared_up_to_the_end_of_the_shorter_one() -> None:
    def run(ends: list[float], lost: int = 0) -> dict[str, Any]:
        rows = [{"end": e, "verdict": "infra_fault" if k < lost else "correct"} for k, e in enumerate(ends)]
        return {"wall_seconds": max(ends, default=0.0), "requests": rows}

    assert meters.beside(run([1.0, 2.0, 3.0]), run([0.5, 1.0, 1.5, 2.0, 2.5, 9.0], lost=1)) == pytest.approx(4 / 3)
    assert meters.beside(run([1.0]), run([])) is None


@pytest.mark.parametrize(
    "options, name",
    [(["--gpus", "99"], "--gpus"), (["--gpus", "x"], "--gpus"), (["--gpus", "0", "--timing"], "--timing"),
     (["--gpus", "0", "--workers", "0"], "--workers"), (["--gpus", "0", "--targets", "sm_1"], "sm_1"),
     (["--gpus", "0", "--each", "0"], "--each"),
     (["--gpus", "0", "--workload", "none.jsonl"], "none.jsonl"), (["--simulate", "none.json"], "none.json")],
)  # fmt: skip
def test_bad_options_end_with_one_line(options: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput.main(options) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and name in told
