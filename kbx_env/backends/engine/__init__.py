"""The CPU tier: executes the recorded steps of a submission's host code, launches included."""

from kbx_env.backends.engine.conversions import argument_to_float, may_copy
from kbx_env.backends.engine.engine import ComputedByHost, Engine, LaunchRefused
from kbx_env.backends.engine.storage import DTYPES, TraceError

__all__ = ["DTYPES", "ComputedByHost", "Engine", "LaunchRefused", "TraceError", "argument_to_float", "may_copy"]
