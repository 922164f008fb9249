"""OpenEnv (``openenv-core`` 0.3): an environment server, and a typed client.

    uvicorn kbx_env.integrations.openenv.server:app --port 8000

The server's settings are environment variables, see ``server``. It may serve models that are trained anywhere; it grades by
itself, or by a grading service (``KBX_GRADER``).
"""

from kbx_env.integrations.openenv.client import KernelClient
from kbx_env.integrations.openenv.models import KernelAction, KernelObservation, KernelState

__all__ = ["KernelAction", "KernelClient", "KernelObservation", "KernelState"]
