"""What a role means to the batch scheduler: a value computed from `Role`, and the value that says how a role changed.

Owns the only place where a role is looked at. It does not know requests or blocks. Invariant: a role changes numbers that
the one scheduler reads; it never refuses a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from pearl.protocol import Role

SERVED_ROLES = (Role.MIXED, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePolicy:
    """`prefill_tokens`: how many tokens of a step may go to requests that are more than one token behind."""

    role: Role
    prefill_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSwitch:
    """A carried-out change of role. `epoch` counts the changes of this engine; messages of older epochs are stale."""

    old: Role
    new: Role
    epoch: int


def plan_role(role: Role, *, max_batch_tokens: int, decode_prefill_tokens: int) -> RolePolicy:
    """The scheduler's view of `role`. MIXED: all of the budget may catch up. DECODE: at most `decode_prefill_tokens`.

    Raises ValueError for a role that is not served.
    """
    if role not in SERVED_ROLES:
        valid = ", ".join(served.value for served in SERVED_ROLES)
        raise ValueError(f"role={str(role)!r}: hand-over of KV is not served by this release, must be one of {valid}")
    catching_up = decode_prefill_tokens if role is Role.DECODE else max_batch_tokens
    return RolePolicy(role=role, prefill_tokens=min(catching_up, max_batch_tokens))
