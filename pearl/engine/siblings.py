"""The n completions of one prompt: separate requests inside, one request id with an index outside.

Owns the translation between the two, and nothing else. Torch-free. Invariant: an id is known here exactly while at least one
of its siblings has not ended; a request with n = 1 keeps its id and never appears here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

import msgspec

from pearl.engine.request import RequestUpdate


class Siblings:
    """Families by the id their caller knows."""

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}
        self._parents: dict[str, str] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._families

    def members(self, request_id: str) -> list[str]:
        """The inner ids of a request: its siblings, or itself."""
        return list(self._families.get(request_id, (request_id,)))

    def names(self, request_id: str, count: int) -> list[str]:
        """Inner ids for `count` new siblings; the zero character keeps them apart from ids that callers choose."""
        return [request_id] if count == 1 else [f"{request_id}\0{index}" for index in range(count)]

    def open(self, request_id: str, names: list[str]) -> None:
        """Remembers the siblings of a request that has been queued."""
        if len(names) > 1:
            self._families[request_id] = names
            self._parents.update(dict.fromkeys(names, request_id))

    def outer(self, name: str) -> str:
        """The id that the caller of an inner id knows."""
        return self._parents.get(name, name)

    def fits(self, request_id: str, name: str, requests: Container[str]) -> bool:
        """Whether a request that comes from elsewhere, with the inner id `name` of `request_id`, is none of `requests` here.

        Siblings come one by one, so that others of the same family may be here already.
        """
        if name in requests:
            return False
        if name == request_id:
            return request_id not in self._families
        family = self._families.get(request_id, [name])
        return request_id not in requests and name in family

    def admit(self, request_id: str, name: str, count: int) -> None:
        """Remembers one of `count` siblings that has come from elsewhere."""
        if count > 1:
            self._families.setdefault(request_id, self.names(request_id, count))
            self._parents[name] = request_id

    def forget(self, name: str) -> None:
        """An inner id that is not here any more; the family goes with the last one."""
        request_id = self._parents.pop(name, None)
        if request_id is not None and not any(sibling in self._parents for sibling in self._families[request_id]):
            del self._families[request_id]

    def outward(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        """The updates as the caller knows the requests; siblings that have ended are forgotten."""
        return [self._translated(update) for update in updates] if self._parents else updates

    def _translated(self, update: RequestUpdate) -> RequestUpdate:
        name, done = update.request_id, update.completion
        request_id = self._parents.get(name)
        if request_id is None:
            return update
        family = self._families[request_id]
        index = family.index(name)
        if done is not None:
            done = dataclasses.replace(done, request_id=request_id)
            self.forget(name)
        return msgspec.structs.replace(update, request_id=request_id, index=index, completion=done)
