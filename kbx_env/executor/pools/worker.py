"""Main program of a worker process: reads requests and writes replies, one JSON object a line."""

from __future__ import annotations

import base64
import faulthandler
import gc
import importlib
import json
import os
import sys

from kbx_env.confinement import close_files
from kbx_env.errors import SandboxError
from kbx_env.executor.pools.process import CLOSED, CORES, opened, reply_of


def serve(spec: str) -> None:
    """Serve requests from stdin until it closes.

    Args:
        spec: ``module:name`` of a callable that makes the grader.
    """
    if cores := os.environ.pop(CORES, ""):
        # Before the first thread or child process starts: they inherit the cores.
        os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    if closed := os.environ.pop(CLOSED, ""):
        close_files(closed.split(os.pathsep))
    faulthandler.enable()  # a crash in a library names the Python code that called it, on stderr
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, which would disturb the replies
    module, _, name = spec.partition(":")
    grader = getattr(importlib.import_module(module), name)()
    if warm := getattr(grader, "zygote", None):
        try:
            warm()
        except SandboxError:  # the first grading tries again, and reports the error
            pass
    # The libraries stay to the end: each full collection would look at a million of their objects.
    gc.collect()
    gc.freeze()
    replies.write("ready\n")
    replies.flush()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            source = base64.b64decode(request["source"])
            reply = opened(request["packs"]) or reply_of(
                grader, request["task"], source, request["options"], request.get("proof")
            )
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    except BrokenPipeError:  # the parent is gone
        pass
    finally:
        grader.close()


if __name__ == "__main__":
    serve(sys.argv[1])
