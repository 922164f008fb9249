"""Keeps Triton's autotuners from measuring in a timed call: they measure while a case is prepared."""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner


class _FrozenCache(dict[Any, Any]):
    """An autotuner's cache that answers every new key with the configuration that was found last."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return next(reversed(self.values()))


class Autotuners:
    """Watches all autotuners of this process by replacing two methods of Triton's class, for good.

    Attributes:
        frozen: While true, a new key gets a configuration that is there already. An autotuner without any configuration
            measures all the same.
        late: Number of measurements while ``frozen``.
    """

    def __init__(self) -> None:
        self.frozen = False
        self.late = 0
        original_bench, original_run, watch = Autotuner._bench, Autotuner.run, self

        def bench(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            watch.late += watch.frozen
            return original_bench(tuner, *args, **kwargs)

        def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            cache = tuner.cache
            if not watch.frozen or not cache or isinstance(cache, _FrozenCache):
                return original_run(tuner, *args, **kwargs)
            tuner.cache = _FrozenCache(cache)
            try:
                return original_run(tuner, *args, **kwargs)
            finally:
                tuner.cache = cache

        Autotuner._bench, Autotuner.run = bench, run  # type: ignore[method-assign]
