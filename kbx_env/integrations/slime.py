"""slime: a server for ``--rm-type remote_rm``, and a reward function for ``--custom-rm-path``.

    uvicorn kbx_env.integrations.slime:app --port 8002
    ... --rm-type remote_rm --rm-url http://HOST:8002 --reward-key reward --label-key task

``remote_rm`` posts ``prompt``, ``response`` and ``label``; the label is the task's id. A grading that the machine lost is
answered with status 503, which slime repeats. Without a server of its own: ``--custom-rm-path
kbx_env.integrations.slime.reward``, which also takes a sample out of training where its grading was lost for good.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.integrations import rows
from kbx_env.integrations.settings import grader_of, json_app, options_of
from kbx_env.spec.catalog import load_task
from kbx_env.train.batch_grader import GradedAnswer
from kbx_env.train.warm_grader import WarmGrader, shared


def make_app(grader: WarmGrader | None = None) -> Any:
    """Make a server app that answers slime's ``remote_rm`` at ``/``.

    Args:
        grader: grades the answers; by default one by environment variables (``kbx_env.integrations.settings``).

    Returns:
        A FastAPI app. Its reply is ``reward``, ``verdict``, ``compiled``, ``correct``, ``solved`` and ``terms``.
    """
    chosen = grader or grader_of(os.environ)

    async def remote_rm(body: dict[str, Any]) -> Any:
        label, response = body.get("label"), body.get("response")
        if not isinstance(label, str) or not isinstance(response, str):
            raise UsageError("the request needs 'response', the answer's text, and 'label', the task's id (--label-key task)")
        (graded,) = await chosen.agrade([(load_task(label).id, response)])
        if graded.reward is None:
            from fastapi.responses import JSONResponse

            return JSONResponse({"detail": f"the grading was lost: {graded.outcome.message[:500]}"}, status_code=503)
        return facts(graded)

    return json_app("kbx_env for slime", {"/": remote_rm})


def facts(graded: GradedAnswer) -> dict[str, Any]:
    """Return a reward and what it is made of, as plain JSON."""
    return {
        "reward": graded.reward, "verdict": str(graded.outcome.verdict), "compiled": graded.compiled,
        "correct": graded.outcome.correct, "solved": graded.solved, "terms": dict(graded.terms),
    }  # fmt: skip


async def reward(args: Any, sample: Any, **more: Any) -> Any:
    """Grade a sample, or a list of samples (slime's ``--custom-rm-path``).

    Args:
        args: slime's arguments; ``reward_key`` is read.
        sample: a sample with ``response`` and ``label``, the task's id, or a list of them. Where a grading was lost
            ``remove_sample`` is set, so that slime does not learn from it.
        **more: not used.

    Returns:
        For each sample the reward, or with ``reward_key`` a dictionary that has it; 0.0 where the grading was lost, which
        slime needs as a number.
    """
    samples = sample if isinstance(sample, list) else [sample]
    options = options_of(os.environ)
    graded = await shared(**options).agrade([(load_task(s.label).id, s.response) for s in samples])
    found: list[Any] = []
    for s, g in zip(samples, graded, strict=True):
        s.remove_sample = s.remove_sample or g.reward is None
        value = 0.0 if g.reward is None else g.reward
        found.append({**facts(g), args.reward_key: value} if getattr(args, "reward_key", None) else value)
    return found if isinstance(sample, list) else found[0]


def table(split: str = "train", category: str | None = None, backend: str = "auto", **more: Any) -> Iterator[dict[str, Any]]:
    """Yield rows for slime (``--input-key prompt --label-key task --apply-chat-template``).

    Args:
        split: ``train``, or ``eval`` to evaluate.
        category: category of the tasks; ``None`` for all.
        backend: ``cpu``, ``cuda`` or ``auto``: the text says whether kernels are timed.
        **more: ``system`` and ``template``, as ``kbx_env.trl.prompts`` takes them.

    Yields:
        One row for each task: ``prompt`` and ``task``.
    """
    for row in rows.plain(split, category, backend, **more):
        yield {"prompt": row["prompt"], "task": row["task"]}


def write_rows(path: str | Path, split: str = "train", category: str | None = None, backend: str = "auto") -> Path:
    """Write the rows of ``table`` to a ``.jsonl`` or ``.parquet`` file.

    Args:
        path: the file.
        split: ``train``, or ``eval`` to evaluate.
        category: category of the tasks; ``None`` for all.
        backend: ``cpu``, ``cuda`` or ``auto``.

    Returns:
        The file.
    """
    return rows.write(path, table(split, category, backend))


def __getattr__(name: str) -> Any:
    """Make ``app`` when a server asks for it."""
    if name == "app":
        globals()["app"] = made = make_app()
        return made
    raise AttributeError(name)
