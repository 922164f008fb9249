"""Task packs: found, named, selected, graded in worker processes, and hidden from submissions."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import gymnasium
import pytest

from kbx_env.__main__ import main
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor.pools.process import ProcessPool, Request
from kbx_env.grading.runtime.zygote_process import ZygoteProcess
from kbx_env.grading.telling import is_telling
from kbx_env.sandbox import limits, script
from kbx_env.spec import packs
from kbx_env.spec.catalog import expert_source, load_task, load_tasks, splits, task_ids

OPTIONS = {"backend": "cpu", "targets": (), "timing": False}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(packs.SELECTED, "")
    monkeypatch.setenv(packs.REGISTERED, "")
    yield
    for name in [m for m in sys.modules if m.startswith(packs.MODULES)]:
        del sys.modules[name]


@pytest.fixture
def pack(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A pack of one task, whose name differs from test to test: a process loads a task once."""
    root = tmp_path / f"p_{abs(hash(request.node.name)) % 10**8}"
    assert main(["new-task", "activation/swish", "--pack", str(root)]) == 0
    return root


def test_a_pack_replaces_the_listed_tasks_and_leaves_all_others_loadable(pack: Path, monkeypatch) -> None:
    monkeypatch.setenv(packs.SELECTED, str(pack))
    name = f"activation/{pack.name}.swish"
    assert task_ids() == (name,) and splits()[name] == "train" and splits()["math/softmax"]
    task = load_task("swish")
    assert task.id == name and task.category == "activation" and task is load_task("activation/swish") is load_task(name)
    assert load_task("math/softmax").id == "math/softmax"
    assert [t.id for t in load_tasks(pattern="swish")] == [name]
    assert "def swish" in (expert_source(name) or "") and "_unary" in (expert_source(name) or "")
    monkeypatch.setenv(packs.SELECTED, f"builtin,{pack}")
    assert name in task_ids() and "math/softmax" in task_ids()


def test_a_selection_for_one_call_leaves_the_process_as_it_was(pack: Path) -> None:
    before = task_ids()
    assert [t.entry for t in load_tasks(tasks_from=str(pack))] == ["swish"]
    assert task_ids() == before and not os.environ[packs.SELECTED]
    with pytest.raises(UnknownName):
        load_task("swish")


def test_a_pack_may_have_splits_helpers_and_telling_cases_of_its_own(pack: Path) -> None:
    (pack / "splits.json").write_text('{"split": {"activation/swish": "generated"}}')
    (pack / "_shared.py").write_text("SLOPE = 1.0\n")
    file = pack / "activation" / "swish.py"
    file.write_text(file.read_text().replace("import torch\n", "import torch\nfrom .._shared import SLOPE\n", 1))
    (task,) = load_tasks(split="generated", tasks_from=str(pack))
    assert len(packs.pack_of(task.id).helpers()) and splits()[task.id] == "generated"
    answer = "0" * len(task.cases)
    (pack / "telling.json").write_text(json.dumps({"activation/swish": {"fingerprint": task.fingerprint, "telling": answer}}))
    assert not is_telling(task, 0)


def test_the_fingerprint_covers_the_helpers(pack: Path, monkeypatch) -> None:
    from kbx_env.spec import catalog

    task = load_tasks(tasks_from=str(pack))[0]
    (pack / "_more.py").write_text("X = 1\n")
    catalog._load.cache_clear()
    assert load_task(task.id).fingerprint != task.fingerprint


def test_what_is_no_pack_is_named(tmp_path: Path, pack: Path, monkeypatch) -> None:
    with pytest.raises(UsageError, match="no task pack 'nowhere'.*installed: none"):
        packs.find("nowhere")
    with pytest.raises(UsageError, match="none of the folders.*new-task"):
        packs.find(str(tmp_path))
    other = tmp_path / "more" / pack.name
    assert main(["new-task", "activation/swish", "--pack", str(pack)]) == 2
    packs.find(str(pack))
    assert main(["new-task", "activation/swish", "--pack", str(other)]) == 2  # equal names
    (other / packs.CARD).write_text('{"name": "Other Name"}')
    with pytest.raises(UsageError, match="is no name for a task pack"):
        packs.find(str(other))
    (other / packs.CARD).write_text('{"name": "other"}')
    assert packs.find(str(other)).task_ids() == ("activation/other.swish",)
    (other / packs.CARD).write_text("[")
    with pytest.raises(UsageError, match="not JSON"):
        packs.find(str(other))


def test_a_file_that_cannot_be_imported_is_named(pack: Path) -> None:
    (pack / "activation" / "swish.py").write_text("import torch\n1 / 0\n")
    with pytest.raises(UsageError, match=r"activation/swish.py cannot be imported: ZeroDivisionError"):
        load_tasks(tasks_from=str(pack))
    assert main(["tasks", "--tasks-from", str(pack)]) == 2


def test_an_installed_pack_is_found_by_its_name(pack: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(pack.parent))
    points = [EntryPoint("installed", pack.name, packs.GROUP)]
    monkeypatch.setattr(packs.importlib.metadata, "entry_points", lambda group: points if group == packs.GROUP else [])
    assert [t.entry for t in load_tasks(tasks_from="installed")] == ["swish"]


def test_workers_that_started_earlier_find_the_pack(pack: Path) -> None:
    pool = ProcessPool(1)
    try:
        assert pool.ready(120)
        (task,) = load_tasks(tasks_from=str(pack))
        outcome = pool.grade(Request(task.id, (expert_source(task.id) or "").encode(), OPTIONS), 120)
    finally:
        pool.close()
    assert outcome.correct and outcome.task == task.id


def test_an_environment_plays_the_tasks_of_a_pack(pack: Path, monkeypatch) -> None:
    outcomes: list[str] = []

    def grade(task: str, source: str, **options: object) -> None:
        outcomes.append(task)
        raise UsageError("enough")

    env = gymnasium.make("kbx/Kernel-v0", tasks_from=str(pack), backend="cpu", grade=grade)
    observation, _ = env.reset(seed=1)
    assert observation["task"].endswith(".swish") and "Swish" in observation["prompt"]
    with pytest.raises(UsageError, match="enough"):
        env.step("x")
    assert outcomes == [observation["task"]]


SPY = """import torch
import triton
{attack}


def swish(input, slope=1.0):
    return input
"""


@pytest.mark.parametrize("attack", ["import kbx_packs", "open({path!r} + '/activation/swish.py', 'a').write('x')"])
def test_a_submission_does_not_reach_the_pack(grader, pack: Path, attack: str) -> None:
    packs.select(str(pack))
    before = (pack / "activation" / "swish.py").read_bytes()
    source = SPY.format(attack=attack.format(path=str(pack)))
    outcome = grader.grade(load_tasks()[0].id, source, **OPTIONS)
    assert str(outcome.verdict) in ("rejected", "compile_error") and (pack / "activation" / "swish.py").read_bytes() == before
    assert packs.MODULES in limits._HIDDEN  # where the text does not say what it imports


def test_the_processes_of_submissions_do_not_know_where_packs_are(pack: Path) -> None:
    packs.select(str(pack))
    with contextlib.closing(ZygoteProcess()) as started:
        environment = b""
        while not environment and started.process.poll() is None:  # the system may not have finished starting the program
            environment = Path(f"/proc/{started.process.pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"KBX_TASKS" not in environment and b"KBX_PACKS" not in environment


def test_scripts_of_policies_cannot_read_a_pack(pack: Path, monkeypatch) -> None:
    (pack.parent / "beside").mkdir()
    packs.find(str(pack))
    monkeypatch.setattr(sys, "argv", ["-c", str(Path(packs.__file__).parent.parent)])
    monkeypatch.setattr(sys, "path", [str(pack.parent)])
    readable = script._readable()
    assert str(pack.parent / "beside") in readable and packs.REGISTERED not in os.environ
    assert not any(str(pack).startswith(place) for place in readable)


FAULTS = (
    ("(input, slope=1.0):", "(input, slope=1.0, mode=None):", "it does not mention the parameter mode"),
    ("[0, 0.731059, -0.238406]", "[0, 0.7, -0.238406]", "the reference returns"),
    ("return input * torch.sigmoid(slope * input)", "return input.float()", "in fp64 the reference returns"),
    ("return input * ", "return input.mul_(2) * ", "the reference changes input"),
    ('layouts={"input": "transposed"}', "", ""),
    ("timed=stream()", "timed=stream()[:2]", "2 sizes; at least 3"),
    ('least="numel(input)"', 'least="numel(inptu)"', "cannot evaluate"),
    ("truth=Close(ulps=8)", "truth=Close(ulps=1e9)", "cheap answers: 'zeros' passes"),
    ("varied=(elementwise(lambda pick: {\"slope\": pick.real(-2, 2)}),)", "varied=()", "no family of derived cases"),
    pytest.param('cost=Cost(flops', 'cost=Cost(bytes="100 * n", flops', "the correct expert moved", marks=pytest.mark.full),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), FAULTS)
def test_check_pack_names_each_fault(pack: Path, capsys, old: str, new: str, said: str) -> None:
    file = pack / "activation" / "swish.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with_grader = "expert moved" in said
    status = main(["check-pack", str(pack), *([] if with_grader else ["--no-grade"])])
    assert status == (2 if said else 0) and said in capsys.readouterr().out


@pytest.mark.full
def test_check_pack_grades_the_expert(pack: Path, capsys) -> None:
    assert main(["check-pack", str(pack)]) == 0
    assert "1 tasks, 0 with faults" in capsys.readouterr().out
