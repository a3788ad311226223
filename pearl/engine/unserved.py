"""The part of the engine's interface that this release does not serve: every call is refused by name. Torch-free.

Owns nothing. A capability that is built leaves this page. Invariant: a refusal is a ValueError that says what is served.
"""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(what: str, served: str) -> NoReturn:
    """ValueError: `what` is not served, `served` is."""
    raise ValueError(f"{what}: is not served by this release, which serves {served}")


class Unserved:
    """Mixed into Engine: moving KV between engines."""

    def take_handoffs(self) -> NoReturn:
        refuse("take_handoffs", "roles mixed and decode")

    def import_kv(self, transfer: Any, transport: str = "auto") -> NoReturn:
        refuse("import_kv", "add_request, which computes the prompt")

    def export_kv(self, request_id: str) -> NoReturn:
        refuse("export_kv", "abort, whose tokens another engine can go on from")

    def finish_export(self, transfer_id: str, ok: bool) -> NoReturn:
        refuse("finish_export", "roles mixed and decode")

    def reserve_kv(self, request_id: str, prompt_token_ids: Any, params: Any, cache_salt: str | None = None) -> NoReturn:
        refuse("reserve_kv", "add_request, which computes the prompt")

    def release_reservation(self, reservation: Any) -> NoReturn:
        refuse("release_reservation", "add_request, which computes the prompt")
