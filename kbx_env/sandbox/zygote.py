"""The warm parent of all runners: has torch and triton imported, forks one runner per request.

Started as ``python -m kbx_env.sandbox.zygote FD FOLDER``. It never touches CUDA, so its forks may.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys


def main() -> None:
    """Serve fork requests on the inherited socket until it closes; the folder of runners goes with it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    from kbx_env.backends.engine import serve as engine
    from kbx_env.sandbox import runner, warm  # imports triton

    warm.warm()

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.sendall(b"R")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        settings = json.loads(message)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sock = socket.socket(fileno=fds[0])
            if settings.get("role") == "engine":
                engine.serve(sock)
            runner.serve(sock, settings)
        for fd in fds:
            os.close(fd)
        control.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    try:
        main()
    except OSError:  # the grader is gone, and nobody else is there to be told
        pass
    finally:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        os._exit(0)
