"""Search and refinement by a model, side by side at the same budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kbx_env.eval import compare_search
from scripted import Asked, Reply, ScriptedServer

from kbx_env.outcome import Cases, Estimate, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source


def grade(task: str, source: str, **options: Any) -> Outcome:
    """The project's own kernel takes 100 us; a source that names a time takes that, any other 90."""
    named = source.rpartition("us=")[2].split()[0] if "us=" in source else "90"
    us = 100.0 if source == expert_source(task) else float(named)
    estimate = Estimate(options["estimate"], us, 1.0, (), "")
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1), estimate=estimate)


def test_geak_beside_search_at_equal_gradings(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        code = f"import triton\ndef relu(x):\n    return x\n# us={50 + asked.number}\n"
        return Reply(json.dumps({"strategy": "s", "code": code}))

    with ScriptedServer(answer) as server:
        argv = ["--policy", "template-search:random", "--policy", "geak", "--model", "m", "--base-url", server.base_url]
        argv += ["--tasks", "activation/relu", "--evals", "8", "--seeds", "1", "--backend", "cpu", "--no-figure"]
        assert compare_search.main([*argv, "--out", str(tmp_path)], grade) == 0
    told = json.loads((tmp_path / "compare.json").read_text())
    runs = {r["policy"]: r for r in told["runs"]}
    assert [len(r["gradings"]) for r in runs.values()] == [8, 8] and runs["geak"]["cut"], "GEAK asks for twelve"
    best = {name: p["best_graded"]["mean"] for name, p in told["summary"]["policies"].items()}
    assert best["geak"] > best["template-search:random"] > 0
    assert (tmp_path / "calls.sqlite").is_file()
