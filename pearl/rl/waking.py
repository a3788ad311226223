"""Whether a rank's engine is awake, and with which weights: wake, sleep, and newer versions for who has no part in publishing.

Owns the order in which trainer, engine and weights change. It knows all three only as what was injected; torch-free.
Invariants: trainer and engine of a rank that lends its device never both have their memory, but for the moment in which one
takes over; what fails leaves them as they were, and raises ValueError with the reason.
"""

from __future__ import annotations

from typing import Any, Protocol

from pearl.protocol import Fetch, Wake


class SleepingEngine(Protocol):
    """An engine, as far as it sleeps and has a version."""

    weight_version: int
    asleep: bool

    def stats(self) -> Any: ...
    def switch_role(self, role: Any) -> Any: ...
    def sleep(self, weights: Any = "keep") -> None: ...
    def wake(self) -> None: ...


class SleepingTrainer(Protocol):
    """What is put aside while a training rank serves (`pearl.rl.trainer.Trainer` has it)."""

    def sleep(self) -> Any: ...
    def wake(self) -> None: ...


class Fetcher(Protocol):
    """The way to a version that is not published to this rank: a snapshot of its machine, or somebody who has it."""

    def begin(self, version: int, pulls: list[str]) -> None:
        """Starts; returns without waiting for others."""

    def poll(self) -> dict[str, Any] | None:
        """Moves on without waiting; what it measured once the engine serves that version or a newer one, else None.

        OSError, RuntimeError or ValueError if it cannot be had; the engine serves what it served before.
        """

    def cancel(self) -> None:
        """Gives up what is under way, if anything is."""


class Waking:
    """`trainer`: of a training rank that lends its device; None for a rank that only serves."""

    def __init__(self, engine: SleepingEngine, fetcher: Fetcher | None, trainer: SleepingTrainer | None) -> None:
        self._engine, self._fetcher, self._trainer = engine, fetcher, trainer
        self._lent = False
        self._order: Wake | Fetch | None = None

    @property
    def under_way(self) -> Wake | Fetch | None:
        return self._order

    def begin(self, order: Wake | Fetch) -> dict[str, Any] | None:
        """Starts; what was measured if it is through at once, else None, and `poll` goes on with it."""
        self.cancel()
        self._order = order
        try:
            if isinstance(order, Wake):
                self._take_memory()
            if self._engine.weight_version < order.weight_version:
                if self._fetcher is None:
                    raise ValueError(f"weight_version={order.weight_version}: this rank has no way to fetch it")
                self._fetcher.begin(order.weight_version, order.pulls)
                return self.poll()
            return self._through({})
        except (OSError, RuntimeError, ValueError) as error:
            raise self._failed(error) from error

    def poll(self) -> dict[str, Any] | None:
        """Moves on what is under way; what it measured once it is through."""
        if self._order is None or self._fetcher is None:
            return None
        try:
            metrics = self._fetcher.poll()
            return None if metrics is None else self._through(metrics)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._failed(error) from error

    def cancel(self) -> None:
        """Another order has come."""
        if self._order is not None:
            self._order = None
            if self._fetcher is not None:
                self._fetcher.cancel()

    def fall_asleep(self) -> None:
        """Gives the engine's memory back (that of the weights too where the trainer needs it) and brings the trainer back.

        Whatever of it was done already is left; so it can be tried again.
        """
        self.cancel()
        try:
            if not self._engine.asleep:
                self._engine.sleep("drop" if self._trainer is not None else "keep")
            self._bring_trainer()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _take_memory(self) -> None:
        if self._trainer is not None and not self._lent:
            self._trainer.sleep()
            self._lent = True
        if self._engine.asleep:
            self._engine.wake()

    def _bring_trainer(self) -> None:
        if self._trainer is not None and self._lent:
            self._trainer.wake()
            self._lent = False

    def _through(self, metrics: dict[str, Any]) -> dict[str, Any]:
        order, self._order = self._order, None
        if isinstance(order, Wake) and self._engine.stats().role != order.role:
            self._engine.switch_role(order.role)
        return metrics

    def _failed(self, error: Exception) -> ValueError:
        """Back to what was before the order, as far as that is possible."""
        order = self._order
        self.cancel()
        if isinstance(order, Wake) and self._trainer is not None:
            self.fall_asleep()
        return error if isinstance(error, ValueError) else ValueError(f"{type(error).__name__}: {error}")
