"""The main program of a worker process: a warm grader that reads requests and writes verdicts, a JSON object a line."""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys

from kbx_env.errors import SandboxError
from kbx_env.executor.pools.process import CORES, answer


def serve(spec: str) -> None:
    """The worker's loop: a request a line in, a verdict a line out."""
    if cores := os.environ.pop(CORES, ""):
        # Before it has a second thread or a process: all of them run where it runs.
        os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not land between the verdicts
    module, _, name = spec.partition(":")
    grader = getattr(importlib.import_module(module), name)()
    if warm := getattr(grader, "zygote", None):
        try:
            warm()
        except SandboxError:  # the first grading tries again, and tells
            pass
    answers.write("ready\n")
    answers.flush()
    try:
        for line in sys.stdin:
            ask = json.loads(line)
            reply = answer(grader, ask["task"], base64.b64decode(ask["source"]), ask["options"])
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    except BrokenPipeError:  # the parent is gone
        pass
    finally:
        grader.close()


if __name__ == "__main__":
    serve(sys.argv[1])
