"""External workers at the door: who gets a number, whose messages count, and who is missed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from pearl.channel import ChannelError, Client
from pearl.config import ElasticOptions
from pearl.protocol import Done, Failed, Join, Ping, Pong, Ready, Report, ToRank
from pearl.rl.door import client_options, largest_message
from pearl.rl.members import PER_TURN, Externals, name_of, number_of

LIMIT_S = 20.0


@pytest.fixture
def door() -> Iterator[SimpleNamespace]:
    context = zmq.Context()
    externals = Externals(context, ElasticOptions(listen="127.0.0.1:0", heartbeat_s=0.5, silence_s=3.0, stuck_s=10.0), 3, 0.0)
    server = externals.server
    assert server is not None

    def connect(name: str, token: str | None = None) -> Client:
        options = client_options(externals.token if token is None else token)
        return Client(context, server.address, name, ToRank, options=options)

    yield SimpleNamespace(externals=externals, connect=connect, context=context)
    context.destroy(linger=0)


def until(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := ready()):
        assert time.monotonic() < deadline, "it did not come"
    return found


def ask(client: Client) -> None:
    client.send(Join(pid=4, host="far"))


def received(door: SimpleNamespace, client: Client) -> Any:
    def look() -> Any:
        door.externals.receive()
        return client.receive()

    return until(look)[0]


def test_names_and_numbers() -> None:
    assert [number_of(name_of(number)) for number in (0, 7, 12)] == [0, 7, 12]


def test_a_worker_gets_the_next_number_and_only_its_own_messages_count(door: SimpleNamespace) -> None:
    first, second = door.connect("a"), door.connect("b")
    for client in (first, second):
        ask(client)
    until(lambda: door.externals.receive() or len(door.externals.joins) == 2)
    members = [door.externals.admit(peer, join, 0.0) for peer, join in door.externals.joins]
    assert [member.number for member in members] == [3, 4]
    assert members[0].gpus == ["rank3"]
    ours = {member.peer: member.number for member in members}
    first.send(Pong(rank=ours["b"], sequence=1))  # under another's number
    first.send(Pong(rank=ours["a"], sequence=2))
    [event] = until(door.externals.receive)
    assert (event.rank, event.sequence) == (ours["a"], 2) and door.externals.dropped["stranger"] == 1


@pytest.mark.parametrize("token", ["guess", "gu\u00e9ss", None])
def test_of_who_does_not_know_the_token_nothing_is_heard(door: SimpleNamespace, token: str | None) -> None:
    """Not one message: whatever strangers send is held by themselves."""
    options = client_options(token) if token else {}
    stranger = Client(door.context, door.externals.address, "s", ToRank, options=options)
    stranger.socket.set(zmq.LINGER, 0)
    monitor = stranger.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    with contextlib.suppress(ChannelError):  # it may have been turned away before it could say anything
        stranger.send(Join(pid=4, host="far"))
    friend = door.connect("a")
    ask(friend)
    until(lambda: door.externals.receive() or (door.externals.joins and (token is None or monitor.poll(0))))
    assert [peer for peer, _ in door.externals.joins] == ["a"] and not door.externals.dropped["stranger"]
    assert (door.externals.dropped["bad_token"] > 0) == (token is not None)
    stranger.socket.disable_monitor()
    monitor.close(0)


def test_a_message_too_large_ends_its_worker_and_one_far_too_large_is_never_held(door: SimpleNamespace) -> None:
    first, second = door.connect("a"), door.connect("b")
    for client in (first, second):
        ask(client)
    until(lambda: door.externals.receive() or len(door.externals.joins) == 2)
    ours = {peer: door.externals.admit(peer, join, 0.0).number for peer, join in door.externals.joins}
    largest = largest_message(0)
    first.send_encoded(bytes(largest))
    until(lambda: door.externals.receive() or door.externals.dropped["unreadable"])  # it may be so large
    first.send_encoded(bytes(largest + 1))
    [failed] = until(door.externals.receive)
    assert isinstance(failed, Failed) and failed.rank == ours["a"] and str(largest) in failed.error
    assert door.externals.dropped["too_large"] == 1
    monitor = second.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    second.send_encoded(bytes(2 * largest + 1))
    until(lambda: door.externals.receive() or monitor.poll(0))  # it is cut off, and comes again
    second.send(Pong(rank=ours["b"], sequence=1))
    [event] = until(door.externals.receive)
    assert isinstance(event, Pong) and event.rank == ours["b"]
    second.socket.disable_monitor()
    monitor.close(0)


def test_one_turn_takes_in_so_many_messages_and_no_more(door: SimpleNamespace) -> None:
    client = door.connect("a")
    for _ in range(3 * PER_TURN):
        client.send(Pong(rank=9, sequence=1))
    until(lambda: door.externals.receive() or door.externals.dropped["stranger"])
    before = door.externals.dropped["stranger"]
    while door.externals.dropped["stranger"] < 3 * PER_TURN:
        door.externals.receive()
        taken, before = door.externals.dropped["stranger"] - before, door.externals.dropped["stranger"]
        assert taken <= PER_TURN


def test_what_cannot_be_read_is_counted_and_no_error(door: SimpleNamespace) -> None:
    client = door.connect("a")
    client.send_encoded(b"\xc1 not a message")
    until(lambda: door.externals.receive() or door.externals.dropped["unreadable"])


def test_asking_twice_is_one_worker_and_the_gone_keep_their_number(door: SimpleNamespace) -> None:
    client = door.connect("a")
    ask(client)
    until(lambda: door.externals.receive() or door.externals.joins)
    member = door.externals.admit(*door.externals.joins.pop(), 0.0)
    ask(client)
    until(lambda: door.externals.receive() or door.externals.dropped["doubled"])
    assert not door.externals.joins
    door.externals.forget(member.number)
    client.send(Pong(rank=member.number, sequence=1))
    until(lambda: door.externals.receive() or door.externals.dropped["stranger"])
    assert not door.externals.send(member.number, Ping(sequence=1))
    ask(client)
    until(lambda: door.externals.receive() or door.externals.joins)
    assert door.externals.admit(*door.externals.joins.pop(), 0.0).number == member.number + 1


def test_asking_often_before_anybody_answers_is_one_worker(door: SimpleNamespace) -> None:
    """What was asked before the job was there comes all at once."""
    client = door.connect("a")
    for _ in range(3):
        ask(client)
    until(lambda: door.externals.receive() or door.externals.dropped["doubled"] == 2)
    assert len(door.externals.joins) == 1


def test_the_silent_are_named_and_others_pinged(door: SimpleNamespace) -> None:
    clients = {name: door.connect(name) for name in "ab"}
    for client in clients.values():
        ask(client)
    until(lambda: door.externals.receive() or len(door.externals.joins) == 2)
    numbers = {peer: door.externals.admit(peer, join, 0.0).number for peer, join in door.externals.joins}
    for number in numbers.values():
        door.externals.prepared(number, Ready(rank=number, max_model_len=9))
    silent: list[int] = []
    for now in range(1, 5):
        silent += door.externals.watch(float(now))
        assert isinstance(received(door, clients["a"]), Ping)
        clients["a"].send(Pong(rank=numbers["a"], sequence=now))
        until(door.externals.receive)
    assert set(silent) == {numbers["b"]}


def test_who_builds_its_engine_may_be_silent_for_longer(door: SimpleNamespace) -> None:
    ask(door.connect("a"))
    until(lambda: door.externals.receive() or door.externals.joins)
    member = door.externals.admit(*door.externals.joins.pop(), 0.0)
    assert not [silent for now in range(1, 17) if (silent := door.externals.watch(float(now)))]
    assert [silent for now in range(17, 20) if (silent := door.externals.watch(float(now)))][-1] == [member.number]


def test_a_main_loop_that_hangs_is_noticed_though_pings_are_answered(door: SimpleNamespace) -> None:
    client = door.connect("a")
    ask(client)
    until(lambda: door.externals.receive() or door.externals.joins)
    number = door.externals.admit(*door.externals.joins.pop(), 0.0).number

    def says(event: Any) -> None:
        client.send(event)
        until(door.externals.receive)

    for now in range(1, 30):  # it does not serve yet
        assert not door.externals.stuck(float(now))
    says(Report(rank=number, epoch=1, running=0, waiting=0, kv_used=0, kv_total=1, weight_version=0))
    for now in range(30, 38):
        assert not door.externals.stuck(float(now))
    says(Done(rank=number, number=7, seconds=0.0))
    for now in range(38, 47):
        says(Pong(rank=number, sequence=now))
        assert not door.externals.stuck(float(now))
    says(Pong(rank=number, sequence=47))
    assert [door.externals.stuck(float(now)) for now in (47, 48)] == [[], [number]]
    door.externals.forget(number)
    assert not door.externals.stuck(99.0)


def test_an_invitation_outlives_its_job(door: SimpleNamespace) -> None:
    host, _, rest = door.externals.invitation.partition(":")
    assert host == "127.0.0.1" and f"tcp://{host}:{rest.partition('/')[0]}" == door.externals.address
    context = zmq.Context()
    options = ElasticOptions(listen="127.0.0.1:0")
    elsewhere = Externals(context, options, 3, 0.0, door.externals.invitation)  # its port is taken: another one, the same token
    assert elsewhere.token == door.externals.token and elsewhere.address != door.externals.address
    assert str(door.externals.address.rpartition(":")[2]) in elsewhere.elsewhere and not door.externals.elsewhere
    invitation = elsewhere.invitation
    elsewhere.close()
    context.term()
    context = zmq.Context()
    with pytest.raises(ValueError, match="elastic.listen=.*workers cannot join there"):
        Externals(context, ElasticOptions(listen=door.externals.address.removeprefix("tcp://")), 3, 0.0)
    context.term()
    context = zmq.Context()

    def there_again() -> bool:
        again = Externals(context, options, 3, 0.0, invitation)
        again.close()
        return again.invitation == invitation

    until(there_again)  # a socket's port is free a moment after it is closed
    context.term()


def test_without_an_address_nobody_comes() -> None:
    context = zmq.Context()
    externals = Externals(context, ElasticOptions(), 2, 0.0)
    assert (externals.address, externals.ends, externals.receive(), externals.watch(9.0)) == ("", [], [], [])
    assert not externals.tell("anybody", Ping(sequence=1))
    context.term()
