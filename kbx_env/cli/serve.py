"""The command ``kbx serve``: the grading service."""

from __future__ import annotations

import argparse

from kbx_env.client import BATCH
from kbx_env.errors import UsageError
from kbx_env.extras import install_hint


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``serve`` to a parser."""
    p = sub.add_parser("serve", help="serve gradings over HTTP, for trainers on other machines")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback); others need --token-file")
    p.add_argument("--port", type=int, default=8300, help="port to listen on (default: 8300; 0: any free one)")
    p.add_argument("--backend", default="auto", help="cpu, cuda, or auto: cuda if there is a GPU (default)")
    p.add_argument("--gpus", type=int, help="GPUs of this machine (default: all)")
    p.add_argument("--workers", type=int, help="gradings at a time, on each GPU (default: what the cores allow)")
    p.add_argument("--token-file", metavar="FILE", help="file with the bearer token that clients must have")
    p.add_argument("--store", metavar="FILE", default="runs/serve/gradings.sqlite", help="file of gradings (default: %(default)s)")
    p.add_argument("--queue", type=int, default=20_000, help="gradings that may wait or run; then 429 (default: 20000)")
    p.add_argument("--executor", default="process", help="process: on this machine (default); ray: on a Ray cluster")
    p.add_argument("--ray-address", help="address of the cluster: local, auto, or HOST:PORT")
    p.add_argument("--screen", type=int, default=0, metavar="N", help="workers here that screen on the CPU tier ahead of the GPU")
    p.add_argument("--screen-url", metavar="URL", help="another kbx serve with --backend cpu that screens")
    p.add_argument("--body", type=float, default=16.0, metavar="MIB", help="largest body of a request (default: 16 MiB)")
    p.add_argument("--deadline", type=float, default=24.0, metavar="HOURS", help="longest time to an outcome (default: 24 hours)")
    p.add_argument("--drain", type=float, default=120.0, metavar="S", help="wait for running gradings at the end (default: 120)")


def command(a: argparse.Namespace) -> int:
    """Run ``serve``.

    Args:
        a: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: a setting is not accepted, or a package is missing.
    """
    try:
        from kbx_env.service.limits import Limits
        from kbx_env.service.server import serve
        from kbx_env.service.service import Settings
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == "kbx_env":
            raise
        raise UsageError(f"kbx serve needs {e.name}, which is not installed; {install_hint('serve')}") from e
    if a.screen < 0 or a.drain < 0:
        raise UsageError(f"--screen is {a.screen}, --drain is {a.drain:g}; 0 or more")
    if a.queue < BATCH:
        raise UsageError(f"--queue is {a.queue}; at least {BATCH}, because clients send batches of that size")
    limits = Limits(queue=a.queue, body=int(a.body * (1 << 20)), deadline=a.deadline * 3600)
    serve(Settings(
        host=a.host, port=a.port, backend=a.backend, gpus=a.gpus, workers=a.workers, token_file=a.token_file, store=a.store,
        executor=a.executor, ray_address=a.ray_address, screen=a.screen, screen_url=a.screen_url, drain=a.drain, limits=limits,
    ))  # fmt: skip
    return 0
