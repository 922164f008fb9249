"""Whole reports with policies that ask a model: nothing lost, nothing asked twice, every failure told."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import REFUSED, Limits
from kbx_env.baselines.llm.log import CallLog
from kbx_env.baselines.policy import make_policy
from kbx_env.eval import report
from kbx_env.eval.progress import asking
from rich.console import Console
from scripted import Asked, Failure, Reply, ScriptedServer

from kbx_env.__main__ import main
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_task, load_tasks

pytestmark = pytest.mark.usefixtures("no_figures")
FEW = "relu,softmax,argmax,rand"


def grade(task: str, source: bytes, **options: object) -> Outcome:
    """Right is what says so."""
    if b"right" in source:
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(2, 2))
    return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "off by 3", Cases(1, 2))


def _kernel(asked: Asked, word: str = "right") -> str:
    found = re.search(r"Task (\S+):", asked.text)
    entry = load_task(found.group(1)).entry if found else "f"
    return f"```python\nimport triton\n\n\ndef {entry}(x):\n    return '{word} {asked.number}'\n```"


def _run(server: ScriptedServer, out: Path, *more: str, policy: str = "claude") -> dict:
    base = ["--policy", policy, "--model", "m", "--base-url", server.base_url, "--backend", "cpu", "--split", "all",
            "--tasks", FEW, "--out", str(out), "--attempts", "2", "--patience", "0.01"]  # fmt: skip
    return json.loads((report.run(report.parser().parse_args([*base, *more]), grade=grade) / "report.json").read_text())


def test_scores_stand_beside_what_they_took(tmp_path: Path) -> None:
    with ScriptedServer(lambda a: Reply(_kernel(a), prompt_tokens=100, completion_tokens=20, cost=0.5)) as server:
        data = _run(server, tmp_path / "out")
    spent = data["summary"]["spent"]
    assert (spent["calls"], spent["prompt_tokens"], spent["completion_tokens"], spent["dollars"]) == (4, 400, 80, 2.0)
    assert spent["gradings"] == 4 and spent["seconds"] > 0 and spent["scripts"] == 0
    assert data["summary"]["correct_rate"] == 1 and data["about"]["model"] == "m"
    row = data["tasks"][0]
    assert row["spent"]["calls"] == 1 and row["spent"]["prompt_tokens"] == 100
    page, text = (tmp_path / "out/report.html").read_text(), (tmp_path / "out/report.md").read_text()
    assert "LLM calls" in page and all(f"- {line}" in text for line in ("LLM calls: 4", "tokens: 480", "dollars: 2"))
    (call,) = [c for c in CallLog(tmp_path / "out/calls.sqlite").rows() if c["task"] == "activation/relu"]
    assert "Task activation/relu" in call["request"]["messages"][0]["content"] and "def relu" in call["text"]


def test_a_resumed_run_asks_nothing_and_says_the_same(tmp_path: Path) -> None:
    with ScriptedServer(lambda a: Reply(_kernel(a))) as server:
        first = _run(server, tmp_path / "out")
        calls = len(server.asked)
        second = _run(server, tmp_path / "out", "--resume")
        assert len(server.asked) == calls == 4
    for data in (first, second):
        for row in [data["summary"], *data["tasks"]]:
            row["spent"]["seconds"] = None  # wall time of this run
    assert first == second


def test_pass_at_k_over_samples(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        return Reply(_kernel(asked, "right" if asked.number % 4 == 0 else "wrong"))

    with ScriptedServer(answer) as server:
        data = _run(server, tmp_path / "out", "--samples", "4", "--tasks", "relu", "--concurrency", "1", policy="autotriton")
    assert data["summary"]["pass_at"] == {"1": 0.25, "2": 0.5, "4": 1.0} and data["summary"]["n"] == 4
    assert "pass@2 50.0 %" in (tmp_path / "out/report.md").read_text()
    assert report.pass_at_k(10, 3, 1) == pytest.approx(0.3) and report.pass_at_k(10, 8, 3) == 1.0


def test_a_refusal_is_an_answer_and_an_outage_is_none(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply | Failure:
        if "math/softmax" in asked.text:
            return Reply("I'm sorry, I cannot help.")
        return Failure("status", 500) if "random/rand" in asked.text else Reply(_kernel(asked))

    with ScriptedServer(answer) as server:
        data = _run(server, tmp_path / "out")
        rows = {r["task"]: r for r in data["tasks"]}
        assert rows["math/softmax"]["verdict"] == "malformed" and "refused" in rows["math/softmax"]["message"]
        lost = rows["random/rand"]
        assert lost["verdict"] == "infra_fault" and lost["reward"] is None and "HTTP 500" in lost["message"]
        assert data["summary"]["n"] == 3 and data["summary"]["infra_faults"] == 1, "an outage is no zero"
    with ScriptedServer(lambda a: Reply(_kernel(a))) as server:
        data = _run(server, tmp_path / "out", "--resume")
        assert [re.search(r"Task (\S+):", a.text).group(1) for a in server.asked] == ["random/rand"]  # type: ignore[union-attr]
        assert data["summary"]["n"] == 4 and data["summary"]["infra_faults"] == 0


def test_a_budget_ends_the_asking_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    with ScriptedServer(lambda a: Reply(_kernel(a))) as server:
        data = _run(server, tmp_path / "out", "--budget-calls", "3")
        assert len(server.asked) == 3 and data["summary"]["n"] == 3 and data["summary"]["infra_faults"] == 1
        left = [r for r in data["tasks"] if r["verdict"] == "infra_fault"]
        assert "budget of 3 calls" in left[0]["message"] and "--budget-calls" in left[0]["message"]
        assert _run(server, tmp_path / "out", "--budget-calls", "3", "--resume")["summary"]["n"] == 3 and len(server.asked) == 3
        assert _run(server, tmp_path / "out", "--budget-calls", "9", "--resume")["summary"]["n"] == 4 and len(server.asked) == 4


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "--model NAME"), (["--model", "m"], "OPENAI_API_KEY|ANTHROPIC_API_KEY"),
        (["--model", "m", "--base-url", "127.0.0.1:80"], "http://"), (["--model", "m", "--samples", "0"], "at least 1"),
        (["--model", "m", "--api", "opanai"], "anthropic"), (["--model", "hf:/nowhere"], "nowhere"),
        (["--model", "m", "--prices", "cheap"], "IN,OUT"), (["--model", "m", "--budget-dollars", "5"], "--prices"),
        (["--model", "m", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"), (["--model", "m", "--stall", "nan"], "stall"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2_before_anything_is_written(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    code = report.main(["--policy", "claude", "--backend", "cpu", "--out", str(tmp_path / "o"), *more])
    assert code == 2 and re.search(says, capsys.readouterr().err) and not (tmp_path / "o").exists()


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_ends_the_run_at_once(status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer([Failure("status", status)]) as server:
        argv = ["--policy", "claude", "--model", "m", "--base-url", server.base_url, "--backend", "cpu", "--split", "all"]
        code = report.main([*argv, "--concurrency", "1", "--out", str(tmp_path / "o")])
        assert code == 2 and f"HTTP {status}" in (said := capsys.readouterr().err) and "--model 'm'" in said
        assert len(server.asked) <= 2


def _main(url: str, out: Path, *more: str) -> int:
    argv = ["--policy", "claude", "--model", "m", "--base-url", url, "--backend", "cpu", "--patience", "0", "--attempts", "2"]
    return report.main([*argv, "--out", str(out), *more])


def test_a_dead_server_ends_the_run_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    assert _main(url, tmp_path / "o") == 2 and not (tmp_path / "o").exists()
    said = capsys.readouterr().err
    assert url in said and "connection" in said and "refused" in said and "--base-url" in said


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        (Failure("status", 401), "HTTP 401"), (Failure("status", 404, message="no model 'm' here"), "no model 'm' here"),
        (Failure("status", 400, message="m is not a valid model ID"), "valid model ID"), (Failure("html"), "--base-url"),
    ],
)  # fmt: skip
def test_one_probe_says_what_the_server_refuses(
    probe: Failure, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with ScriptedServer([Reply("x")], probe=probe) as server:
        assert _main(server.base_url, tmp_path / "o") == 2 and (server.probes, server.asked) == (1, [])
    assert says in (said := capsys.readouterr().err) and "sk-secret" not in said and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "probe",
    [Failure("status", 429), Failure("status", 503), Failure("status", 400, message="output limit reached"), Reply("r", "length")],
)
def test_a_busy_server_and_a_model_that_thinks_longer_pass_the_probe(probe: Failure | Reply) -> None:
    with ScriptedServer(lambda a: Reply(_kernel(a)), probe=probe) as server:
        policy = make_policy("claude", Access("m", server.base_url))
        policy.probe()  # type: ignore[union-attr]
        policy.act({"task": "math/softmax", "prompt": "Task math/softmax:", "turn": 0})  # type: ignore[union-attr]
        assert (server.probes, len(server.asked)) == (1, 1)
    assert policy.spent("math/softmax", 0).calls == 1, "the probe is in no sum"  # type: ignore[union-attr]


def test_a_resumed_run_probes_only_before_a_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(lambda a: Reply(_kernel(a))) as server:
        _run(server, tmp_path / "o", "--tasks", "relu,softmax")
        _run(server, tmp_path / "o", "--tasks", "relu,softmax", "--resume")
        assert server.probes == 1
        server.probe = Failure("status", 401)
        assert _main(server.base_url, tmp_path / "o", "--tasks", FEW, "--resume") == 2 and server.probes == 2
    assert "HTTP 401" in capsys.readouterr().err


def test_a_run_stops_when_its_first_calls_are_all_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer([Failure("status", 500, message="the GPU is lost")]) as server:
        assert _main(server.base_url, tmp_path / "o", "--split", "all", "--concurrency", "1") == 2
        assert len(server.asked) == 2 * REFUSED
    said = capsys.readouterr().err
    assert "first 8 calls all failed" in said and "the GPU is lost" in said and "--resume" in said


def test_a_short_run_without_an_answer_does_not_end_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer([Failure("status", 500, message="the GPU is lost")]) as server:
        assert _main(server.base_url, tmp_path / "o", "--tasks", FEW) == 2
    said = capsys.readouterr().err
    assert "no call of its model was answered" in said and "the GPU is lost" in said
    assert "4 of 176 tasks (--split all" in said, "--tasks looks in all splits"


def test_progress_tells_calls_tokens_cost_and_the_last_error(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply | Failure:
        if asked.number == 0:
            return Failure("status", 500, message="the GPU is lost")
        return Reply(_kernel(asked), prompt_tokens=1000, completion_tokens=200, cost=0.25)

    with ScriptedServer(answer) as server:
        policy = make_policy("claude", Access("m", server.base_url, limits=Limits(attempts=2, patience=0)))
        for task in ("math/softmax", "activation/relu"):
            policy.act({"task": task, "prompt": f"Task {task}:", "turn": 0})  # type: ignore[union-attr]
        assert (server.probes, len(server.asked)) == (1, 3)
    status = policy.caller.status()  # type: ignore[union-attr]
    assert status.startswith("2 calls, 2,400 tokens, $0.50; last error: server_error: HTTP 500") and "\n" not in status
    shown = io.StringIO()
    with asking({"p": (2, lambda: status), "q": (1, None)}, Console(file=shown, width=300, force_terminal=True)) as progress:
        progress.advance("p")
        progress.advance("q")
        assert progress.lines() == [f"p: 1 of 2 answers graded; {status}"]
    assert "2 calls, 2,400 tokens, $0.50; last error" in shown.getvalue()


KILLED = """
import sys
sys.path.insert(0, {here!r})
from kbx_env.eval import report
from test_runs import grade
report.run(report.parser().parse_args({argv!r}), grade=grade)
"""


@pytest.mark.parametrize("policy", ["claude", "geak"])
def test_killed_in_the_middle_and_resumed_no_call_is_repeated(policy: str, tmp_path: Path) -> None:
    """SIGKILL at a moment of the server's choice; what was recorded by then is never asked again."""

    def answer(asked: Asked) -> Reply:
        time.sleep(0.01)
        if "with exactly these keys" in asked.text or "Answer in a few sentences" in asked.text:
            return Reply(f"thought {len(asked.text)} {asked.body.get('seed')}")
        return Reply(_kernel(asked, "right" if asked.body.get("seed", 0) % 3 == 0 else "wrong").replace(str(asked.number), "n"))

    twenty = [t.id for t in load_tasks()][::8][:20]
    with ScriptedServer(answer) as server:
        argv = ["--policy", policy, "--model", "m", "--base-url", server.base_url, "--backend", "cpu", "--split", "all",
                "--tasks", ",".join(twenty), "--concurrency", "4", "--out", str(tmp_path / "out")]  # fmt: skip
        whole = 20 if policy == "claude" else 20 * 36
        code = KILLED.format(here=str(Path(__file__).parent), argv=argv)
        child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
        end = time.monotonic() + 60
        while len(server.asked) < whole // 3 and time.monotonic() < end and child.poll() is None:
            time.sleep(0.001)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -9 and child.stderr is not None
        child.stderr.close()
        before = len(server.asked)
        log = CallLog(tmp_path / "out/calls.sqlite")
        finished = {json.dumps([r["request"]["messages"], r["request"]["seed"]]) for r in log.rows()}
        log.close()
        assert 0 < len(finished) <= before < whole
        done = report.run(report.parser().parse_args([*argv, "--resume"]), grade=grade)
        after = [json.dumps([a.body["messages"], a.body["seed"]]) for a in server.asked[before:]]
    assert not finished & set(after), "a call that had ended is not made again"
    assert len(after) == len(set(after)) == whole - len(finished)
    data = json.loads((done / "report.json").read_text())
    assert data["summary"]["n"] == 20 and data["summary"]["spent"]["calls"] == whole


def test_the_record_is_read_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(asked: Asked) -> Reply | Failure:
        return Failure("status", 503) if asked.number == 0 else Reply(_kernel(asked), prompt_tokens=3, completion_tokens=4)

    with ScriptedServer(answer) as server:
        _run(server, tmp_path / "out")
    capsys.readouterr()
    file = str(tmp_path / "out/calls.sqlite")
    assert main(["calls", file, "--task", "math/*"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["task"] == "math/softmax" and row["prompt_tokens"] == 3 and "def softmax" in row["text"]
    assert main(["calls", file, "--failures"]) == 0 and json.loads(capsys.readouterr().out)["kind"] == "server_error"
    assert main(["calls", file, "--total"]) == 0 and json.loads(capsys.readouterr().out)["calls"] == 4
    assert main(["calls", str(tmp_path / "none.sqlite")]) == 2 and "calls.sqlite" in capsys.readouterr().err
