"""What a role means to the batch scheduler: a value computed from `Role`, and the value that says how a role changed.

Owns the only place where a role is looked at. It does not know blocks or how requests move. Invariant: a role changes numbers
that the one scheduler reads, and whether finished prompts are offered to other engines; it never refuses a request that does
not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pearl.engine.request import Request
from pearl.protocol import Role

Drain = Literal["handover", "finish", "recompute"]
DRAINS = ("handover", "finish", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePolicy:
    """`prefill_tokens`: how many tokens of a step may go to requests that are more than one token behind.

    `hands_over`: requests whose prompt is computed leave with their first token instead of being decoded here. `gives_back`:
    those of which more is to be computed than they allow (`Request.most_computed`) are not begun.
    """

    role: Role
    prefill_tokens: int
    hands_over: bool
    gives_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSwitch:
    """A change of role. `epoch` counts the changes of this engine; credits of older epochs are void.

    `leaving` are the running requests that the new role does not go on with.
    """

    old: Role
    new: Role
    epoch: int
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSwitchReport:
    """What a change of role cost: `seconds`, and how many requests were offered to other engines, finished first or are
    computed anew."""

    seconds: float
    moved: int = 0
    finished: int = 0
    recomputed: int = 0


def plan_role(role: Role, *, max_batch_tokens: int, decode_prefill_tokens: int) -> RolePolicy:
    """The scheduler's view of `role`. MIXED, PREFILL: all of the budget may catch up. DECODE: at most `decode_prefill_tokens`.

    Raises ValueError for what is no role.
    """
    if role not in tuple(Role):
        raise ValueError(f"role={str(role)!r}: must be one of {', '.join(Role)}")
    role = Role(role)
    decodes = role is Role.DECODE
    catching_up = min(decode_prefill_tokens if decodes else max_batch_tokens, max_batch_tokens)
    return RolePolicy(role=role, prefill_tokens=catching_up, hands_over=role is Role.PREFILL, gives_back=decodes)


def plan_switch(old: RolePolicy, new: RolePolicy, running: Iterable[Request], epoch: int) -> RoleSwitch:
    """Of the `running` requests those leave that are being decoded, when decoding is what the new role hands over."""
    decoding = [request.request_id for request in running if request.is_decoding and not request.num_in_flight]
    leaving = decoding if new.hands_over and not old.hands_over else []
    return RoleSwitch(old=old.role, new=new.role, epoch=epoch, leaving=tuple(leaving))
