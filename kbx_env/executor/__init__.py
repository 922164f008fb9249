"""Runs gradings on a worker pool: priorities, sharing, attempts, deadlines, back-pressure, cancellation, and a store."""

from kbx_env.executor.executor import Executor
from kbx_env.executor.pools.process import GRADER, InlinePool, ProcessPool, Request, WorkerLost, WorkerPool

__all__ = ["GRADER", "Executor", "InlinePool", "ProcessPool", "Request", "WorkerLost", "WorkerPool"]
