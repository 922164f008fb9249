"""Autotuners beside the clock: they measure while a case is prepared, and never in a timed call."""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner


class _Held(dict[Any, Any]):
    """The cache of an autotuner that has done its work: a new key takes the configuration that was found last."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> Any:
        return next(reversed(self.values()))


class Autotuners:
    """Watches all autotuners of this process.

    While ``frozen``, keys that depend on values take a configuration that is there; a tuner that has none measures all the
    same, and that is counted.
    """

    def __init__(self) -> None:
        self.frozen = False
        self.late = 0
        measure, launch, watch = Autotuner._bench, Autotuner.run, self

        def bench(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            watch.late += watch.frozen
            return measure(tuner, *args, **kwargs)

        def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            plain = tuner.cache
            if not watch.frozen or not plain or isinstance(plain, _Held):
                return launch(tuner, *args, **kwargs)
            tuner.cache = _Held(plain)
            try:
                return launch(tuner, *args, **kwargs)
            finally:
                tuner.cache = plain

        Autotuner._bench, Autotuner.run = bench, run  # type: ignore[method-assign]
