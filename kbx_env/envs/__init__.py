"""The gymnasium environments ``KernelEnv`` and ``ScheduleEnv``: observations, actions, rewards and episodes."""
