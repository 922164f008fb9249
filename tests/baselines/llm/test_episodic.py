"""GEAK and KernelAgent, driven by a scripted model: their rounds, what they remember, what they spend, what they hand in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import pytest
from kbx_env.baselines._geak_prompts import CRITERIA
from kbx_env.baselines.geak import Geak
from kbx_env.baselines.kernelagent import KernelAgent, as_entry, banned
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import Limits
from kbx_env.baselines.llm.retrieve import nearest
from kbx_env.baselines.policy import make_policy
from scripted import Asked, Failure, Reply, ScriptedServer

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import ModelError
from kbx_env.grading.runtime.policy_script import ScriptResult
from kbx_env.outcome import Cases, Evidence, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task, splits

TASK = load_task("activation/relu")
RIGHT = "import triton\n\n\ndef relu(input, inplace=False, out=None):\n    return 'right'\n"
WRONG = RIGHT.replace("right", "wrong")


def _access(server: ScriptedServer, **more: object) -> Access:
    return Access(model="m", base_url=server.base_url, limits=Limits(**{"attempts": 2, "patience": 0.01, **more}))  # type: ignore[arg-type]


def _fenced(code: str) -> str:
    return f"```python\n{code}```"


class Bench(Episode):
    """An episode whose grader finds ``right`` in a source; scripts pass when their kernel says so."""

    def __init__(self) -> None:
        super().__init__(TASK, "cpu", self._judge)
        self.graded: list[str] = []
        self.ran: list[dict[str, str]] = []

    def _judge(self, sources: Sequence[str]) -> list[Outcome]:
        self.graded += sources
        return [_outcome(s) for s in sources]

    def run_script(self, files, entry, wall=30.0):  # type: ignore[no-untyped-def]
        self.ran.append(dict(files))
        good = "right" in files["kernel.py"]
        return ScriptResult(0 if good else 1, "", "" if good else "AssertionError: 3 of 9 differ", 0.1)


def _outcome(source: str) -> Outcome:
    if "right" not in source:
        return Outcome(TASK.id, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "off by 3", Cases(1, 2))
    moved = int(found.group(1)) if (found := re.search(r"moved=(\d+)", source)) else 100
    return Outcome(TASK.id, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(2, 2),
                   evidence=Evidence(1, moved_bytes=moved, ideal_bytes=50))  # fmt: skip


# -- GEAK ------------------------------------------------------------------------------------------


def _geak(script: Callable[[Asked], str | Failure], bench: Bench) -> tuple[Trajectory, list[Asked], Geak]:
    def answer(asked: Asked) -> Reply | Failure:
        said = script(asked)
        return said if isinstance(said, Failure) else Reply(said)

    with ScriptedServer(answer) as server:
        policy = make_policy("geak", _access(server))
        assert isinstance(policy, Geak)
        return policy.run(TASK, bench), server.asked, policy


def _kind(asked: Asked) -> str:
    if "nothing else, with exactly these keys" in asked.text:
        return "evaluate"
    return "reflect" if "Answer in a few sentences" in asked.text else "generate"


def _json(code: str) -> str:
    return json.dumps({"strategy": "try", "code": code})


def test_geak_first_wrong_then_right() -> None:
    bench, rounds = Bench(), {"generate": 0}

    def script(asked: Asked) -> str:
        if _kind(asked) == "evaluate":
            return json.dumps(dict.fromkeys(CRITERIA, 0.5))
        if _kind(asked) == "reflect":
            return "The mask is missing." if "off by 3" in asked.text else "It reads everything twice."
        rounds["generate"] += 1
        return _json(WRONG if rounds["generate"] <= 4 else RIGHT + f"# {rounds['generate']}\n")

    trajectory, asked, policy = _geak(script, bench)
    kinds = [_kind(a) for a in asked]
    assert {k: kinds.count(k) for k in set(kinds)} == {"generate": 12, "evaluate": 12, "reflect": 12}
    assert len(bench.graded) == 12 and policy.spent(TASK.id, 0).calls == 36
    assert trajectory.source is not None and "right" in trajectory.source
    assert [t.correct for t in trajectory.turns] == [False] * 4 + [True] * 8
    assert {t.round for t in trajectory.turns} == {0, 1, 2} and trajectory.notes["modes"] == ["fresh", "debug", "fresh"]
    generated = [a.text for a in asked if _kind(a) == "generate"]
    assert all("A kernel for a related task" in t for t in generated[:4])
    assert all("off by 3" in t and "The mask is missing." in t for t in generated[4:8]), "repair shows the history"
    assert all("beats them" in t and "It reads everything twice." in t for t in generated[8:]), "then it optimises"


def test_geak_keeps_the_best_and_hands_it_in() -> None:
    numbers = iter([90, 60, 80, 70, 95, 55, 99, 98, 97, 96, 94, 93])

    def script(asked: Asked) -> str:
        return _json(f"{RIGHT}# moved={next(numbers)}\n") if _kind(asked) == "generate" else "{}"

    trajectory, asked, _ = _geak(script, Bench())
    assert trajectory.source is not None and "moved=55" in trajectory.source
    last = [a.text for a in asked if _kind(a) == "generate"][-1]
    assert [int(n) for n in re.findall(r"moved=(\d+)", last)] == [55, 60, 70, 80, 90], "the five best, the best first"


def test_geak_survives_answers_that_are_no_answers() -> None:
    replies = iter(["no json at all", '{"strategy": 1}', "", _fenced(RIGHT)] + ["{" * 50] * 40)
    bench = Bench()
    trajectory, asked, _ = _geak(lambda a: next(replies) if _kind(a) == "generate" else "[not, json", bench)
    assert trajectory.source == RIGHT and bench.graded == [RIGHT]
    assert len(asked) <= 36
    nothing, _, _ = _geak(lambda a: "I cannot do that", Bench())
    assert nothing.source is None and "code" in nothing.reason


def test_geak_of_all_wrong_hands_in_the_last_that_ran() -> None:
    count = iter(range(1000))
    bench = Bench()
    trajectory, asked, _ = _geak(lambda a: _json(f"{WRONG}# {next(count)}") if _kind(a) == "generate" else "x", bench)
    assert trajectory.source == bench.graded[-1] and trajectory.notes["modes"] == ["fresh", "debug", "debug"]
    third = [a.text for a in asked if _kind(a) == "generate"][-1]
    assert third.count("\nAttempt ") == 2, "a slot's history grows"


def test_geak_answers_alike_from_the_record() -> None:
    count = iter(range(1000))

    def script(asked: Asked) -> str:
        return _json(f"{RIGHT}# moved={60 + next(count)}") if _kind(asked) == "generate" else "x"

    with ScriptedServer(lambda a: Reply(script(a))) as server:
        access = _access(server)
        first = make_policy("geak", access).run(TASK, Bench())  # type: ignore[union-attr]
        calls = len(server.asked)
        second = make_policy("geak", access).run(TASK, Bench())  # type: ignore[union-attr]
        assert calls == len(server.asked) == 36 and first == second


def test_a_server_that_fails_leaves_the_answer_open() -> None:
    with pytest.raises(ModelError, match="round 0"):
        _geak(lambda a: Failure("status", 500) if _kind(a) == "reflect" else _json(RIGHT), Bench())


def test_retrieval_shows_train_experts_only_and_never_the_task_s_own() -> None:
    train = [t for t, split in splits().items() if split == "train"]
    for task in splits():
        for by, query in (("text", f"{task} {load_task(task).spec}"), ("code", expert_source(task) or "")):
            found = nearest(query, by=by, without=task)
            assert found in train and found != task


# -- KernelAgent -----------------------------------------------------------------------------------

TEST = "from kernel import kernel_function\nassert kernel_function(1)\n"
K_RIGHT = "import triton\n\n\ndef kernel_function(x):\n    return 'right'\n"
K_WRONG = K_RIGHT.replace("right", "wrong")


def _role(asked: Asked) -> str:
    if asked.text.startswith("Write a test"):
        return "test"
    return "seed" if asked.text.startswith("Write a Triton kernel that passes") else "refine"


def _agent(script: Callable[[Asked], str], bench: Bench) -> tuple[Trajectory, list[Asked], KernelAgent]:
    with ScriptedServer(lambda a: Reply(script(a))) as server:
        policy = make_policy("kernelagent", _access(server))
        assert isinstance(policy, KernelAgent)
        return policy.run(TASK, bench), server.asked, policy


def test_kernelagent_first_wrong_then_right() -> None:
    bench = Bench()
    answers = {"test": TEST, "seed": K_WRONG, "refine": K_RIGHT}
    trajectory, asked, policy = _agent(lambda a: _fenced(answers[_role(a)]), bench)
    assert trajectory.source == as_entry(K_RIGHT, "relu") and trajectory.source.endswith("\nrelu = kernel_function\n")
    assert [_role(a) for a in asked] == ["test"] + ["seed"] * 3 + ["refine"] * 3
    assert len(bench.ran) == 6 and bench.graded == [], "the grader is not asked on the way"
    spent = policy.spent(TASK.id, 0)
    assert (spent.calls, spent.scripts) == (7, 6)
    assert all("3 of 9 differ" in a.text and TEST in a.text for a in asked[4:])
    assert all(TEST in a.text and TASK.spec not in a.text for a in asked[1:4]), "seeds see the test, not the task"
    assert asked[0].body["temperature"] == 0.4 and asked[0].body["max_tokens"] == 24000 and asked[1].body["max_tokens"] == 20000


def test_kernelagent_gives_up_with_nothing() -> None:
    bench = Bench()
    trajectory, asked, policy = _agent(lambda a: _fenced(TEST if _role(a) == "test" else K_WRONG), bench)
    assert trajectory.source is None and "5 rounds" in trajectory.reason
    assert len(asked) == 19 and policy.spent(TASK.id, 0).calls == 19 and len(bench.ran) == 15
    assert "Earlier rounds" in asked[-1].text and "Earlier rounds" not in asked[4].text


def test_kernelagent_takes_the_first_worker_that_passes() -> None:
    def script(asked: Asked) -> str:
        return _fenced(TEST if _role(asked) == "test" else [K_WRONG, K_RIGHT + "# 1\n", K_RIGHT + "# 2\n"][asked.number - 1])

    with ScriptedServer(lambda a: Reply(script(a), delay=0.2 if a.number == 2 else 0)) as server:
        policy = make_policy("kernelagent", _access(server, concurrency=1))
        trajectory = policy.run(TASK, Bench())  # type: ignore[union-attr]
    assert trajectory.source is not None and "passed its own test in round 0" in trajectory.notes["own_test"]
    assert len(server.asked) == 4


def test_kernelagent_feeds_a_banned_call_back_without_running_it() -> None:
    bench = Bench()
    cheat = K_RIGHT.replace("'right'", "torch.nn.functional.relu(x)")
    answers = {"test": TEST, "seed": cheat, "refine": K_RIGHT}
    trajectory, asked, _ = _agent(lambda a: _fenced(answers[_role(a)]), bench)
    assert trajectory.source is not None and all("torch.nn" not in f["kernel.py"] for f in bench.ran)
    assert "uses what is forbidden: torch.nn" in asked[4].text


@pytest.mark.parametrize("text", ["I cannot", _fenced("print('a test of nothing')")])
def test_kernelagent_without_a_test_stops_early(text: str) -> None:
    trajectory, asked, _ = _agent(lambda a: text, Bench())
    assert trajectory.source is None and "test" in trajectory.reason and len(asked) == 1


def test_kernelagent_s_own_tests_are_not_run_again_on_a_resume() -> None:
    answers = {"test": TEST, "seed": K_WRONG, "refine": K_RIGHT}
    with ScriptedServer(lambda a: Reply(_fenced(answers[_role(a)]))) as server:
        access, first, second = _access(server), Bench(), Bench()
        one = make_policy("kernelagent", access).run(TASK, first)  # type: ignore[union-attr]
        two = make_policy("kernelagent", access).run(TASK, second)  # type: ignore[union-attr]
        assert one == two and len(server.asked) == 7 and len(first.ran) == 6 and second.ran == []


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        ("y = torch.nn.functional.relu(x)", "torch.nn"), ("y = F.gelu(x)", "functional"), ("import inspect", "inspect"),
        ("y = a.matmul(b)", "matrix"), ("y = torch.bmm(a, b)", "matrix"), ("y = torch.softmax(x, 0)", "activations"),
        ("torch.ops.aten.add(x, y)", "torch.ops"), ("m.forward(x)", "forward"), ("globals()['x']", "globals"),
        ("y = torch.max_pool2d(x, 2)", "pooling"),
    ],
)  # fmt: skip
def test_bans(code: str, broken: str) -> None:
    assert any(broken in b for b in banned(code))
    assert banned(f"# {code}\nx = {code!r}\n") == [], "words in comments and strings are no calls"


def test_what_a_kernel_needs_is_not_banned() -> None:
    fine = "y = torch.empty_like(x)\nacc = tl.dot(a, b)\nn = tl.sigmoid(z)\nx = tl.sum(v)\nq = tl.math.exp(x)\n"
    assert banned(fine) == [] and banned("def (") == []
    assert banned(expert_source("matrixmultiply/matmul_bf16") or "") == []
