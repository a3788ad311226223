"""Which transports of KV an engine has.

Owns the order in which "auto" tries them, the cheapest first. It knows nothing of engines.
"""

from __future__ import annotations

from pearl.engine.migration.host import HostTransport
from pearl.engine.migration.local import LocalTransport
from pearl.engine.migration.transport import Transport


def all_transports() -> list[Transport]:
    """New ones, for one engine."""
    return [LocalTransport(), HostTransport()]
