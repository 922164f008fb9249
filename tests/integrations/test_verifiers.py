"""verifiers: the taskset as its own loaders find it, and tasks that score a trace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")
import verifiers.v1 as vf
from service_stand_in import by_word

from kbx_env.envs.prompt import instruction
from kbx_env.spec.catalog import load_task

TASK, WRONG = "random/logspace", 0.1 + 0.3 * 0.5


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grader: Any) -> Any:
    (tmp_path / "kbx_kernels.py").write_text("from kbx_env.integrations.verifiers import KernelTaskset, __all__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("kbx_env.integrations.verifiers.shared", lambda *args, **options: grader)
    config = vf.taskset_config_type("kbx_kernels")(id="kbx_kernels", category="random", task={"backend": "cpu"})
    return vf.load_taskset(config)


def _trace(task: Any, text: str) -> Any:
    nodes = [vf.MessageNode(message=vf.UserMessage(content=task.data.prompt)),
             vf.MessageNode(parent=0, message=vf.AssistantMessage(content=text), sampled=True)]  # fmt: skip
    told = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return vf.Trace(task=told, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)


def test_tasks_and_scores(taskset: Any) -> None:
    tasks = {t.key: t for t in taskset}
    task = tasks[TASK]
    assert task.data.prompt == instruction(load_task(TASK), "cpu") and task.data.category == "random"
    assert by_word(TASK, "GOOD").correct

    def score(text: str) -> Any:
        trace = _trace(task, text)
        asyncio.run(task.score(trace))
        return trace

    good, bad = score("Here:\n```python\n# GOOD\n```"), score("BAD")
    assert good.rewards["kernel"].score == 1.0 and good.metrics["solved"] == 1.0 and good.info["verdict"] == "correct"
    assert bad.rewards["kernel"].score == WRONG and bad.metrics["term_cases"] == 0.5 and "speedup" not in bad.metrics
    with pytest.raises(vf.TaskError, match="was lost"):
        score("LOST")
