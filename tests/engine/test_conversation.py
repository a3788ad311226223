"""One connection between two processes: who waits patiently does not wait for a machine that is no more."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from pearl.engine.comm import conversation
from pearl.engine.comm.conversation import Conversation, ConversationError
from pearl.engine.weights.conversation import Ask

TCP_REPAIR = 19
"""tcp(7): a socket that is closed in this state says nothing to the other end."""


def test_a_machine_that_vanishes_without_a_farewell_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 2}
    assert conversation.KEEPALIVE.keys() == soon.keys()
    monkeypatch.setattr(conversation, "KEEPALIVE", soon)
    heard: queue.Queue[object] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        ours = Conversation(listener.accept()[0])
        try:
            theirs.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except OSError:
            pytest.skip("this process may not close a connection in silence")
        theirs.close()

        def listen() -> None:
            try:
                heard.put(ours.hear(Ask, 5.0, patient=True))
            except ConversationError as error:
                heard.put(error)

        threading.Thread(target=listen, daemon=True).start()
        assert isinstance(heard.get(timeout=30), ConversationError)
        assert ours.gone()
        ours.close()
