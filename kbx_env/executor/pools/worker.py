"""A worker process, a fork of the pool's fork server: reads requests and writes replies, one JSON object a line."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import sys

from kbx_env.errors import SandboxError
from kbx_env.executor.pools.process import opened, reply_of
from kbx_env.protocol.status import READY_BYTES


def serve(spec: str, requests: int, replies: int) -> None:
    """Serve requests until their end.

    Args:
        spec: ``module:name`` of a callable that makes the grader.
        requests: file descriptor from which requests are read.
        replies: file descriptor for the process id (``READY_BYTES``), a line once the grader is warm, and one for each request.
    """
    if torch := sys.modules.get("torch"):  # a fork has one thread until it is told otherwise
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    grader = None
    # A broken pipe: the parent is gone.
    with contextlib.suppress(BrokenPipeError), os.fdopen(requests, "rb") as lines, os.fdopen(replies, "w") as out:
        try:
            os.write(replies, os.getpid().to_bytes(READY_BYTES, "little"))
            module, _, name = spec.partition(":")
            grader = getattr(importlib.import_module(module), name)()
            if warm := getattr(grader, "zygote", None):
                # Otherwise the first grading tries again, and reports the error.
                with contextlib.suppress(SandboxError):
                    warm()
            print("ready", file=out, flush=True)
            for line in lines:
                request = json.loads(line)
                source = base64.b64decode(request["source"])
                reply = opened(request["packs"]) or reply_of(
                    grader, request["task"], source, request["options"], request.get("proof")
                )
                print(json.dumps(reply), file=out, flush=True)
        finally:
            if grader is not None:
                grader.close()
