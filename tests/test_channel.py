"""Messages arrive whole and in order; junk is counted; every wait ends by its name."""

import time

import msgspec
import pytest
import zmq

from pearl.channel import ChannelError, Client, Server, wait, wait_until
from pearl.protocol import Notice, Ping, Pong


@pytest.fixture
def pair():
    context = zmq.Context()
    server = Server(context, "tcp://127.0.0.1:0", Pong)
    client = Client(context, server.address, "rank0", Ping | Notice)
    yield server, client
    client.close()
    server.close()
    context.term()


def _exchange(server: Server, client: Client) -> None:
    client.send(Pong(rank=0, sequence=0))
    assert wait([server], 5.0)
    assert server.receive() == [("rank0", Pong(rank=0, sequence=0))]


def test_messages_arrive_in_order_from_a_named_peer(pair):
    server, client = pair
    _exchange(server, client)
    for sequence in range(100):
        server.send("rank0", Ping(sequence=sequence))
    seen = []
    wait_until([client], lambda: seen.extend(client.receive()) or len(seen) == 100, 5.0, "100 pings")
    assert [ping.sequence for ping in seen] == list(range(100))


def test_the_bound_port_is_a_real_one(pair):
    assert int(pair[0].address.rsplit(":", 1)[1]) > 0


def test_junk_is_counted_and_does_not_end_the_loop(pair):
    server, client = pair
    client.send_encoded(b"\xff\x00 junk")
    client.send_encoded(msgspec.msgpack.encode({"type": "unknown"}))
    client.send(Pong(rank=0, sequence=7))
    seen = []
    wait_until([server], lambda: seen.extend(server.receive()) or bool(seen), 5.0, "the good message")
    assert seen == [("rank0", Pong(rank=0, sequence=7))]
    assert server.rejected == 2


def test_lists_in_lists_without_end_are_junk_too(pair):
    """Also where nobody would read them: in a field that is unknown here."""
    server, client = pair
    whole = bytearray(msgspec.msgpack.encode(Pong(rank=0, sequence=1)))
    whole[0] += 1  # one field more
    client.send_encoded(bytes(whole) + b"\xa1z" + b"\x91" * 100_000 + b"\xc0")
    client.send(Pong(rank=0, sequence=7))
    seen = []
    wait_until([server], lambda: seen.extend(server.receive()) or bool(seen), 5.0, "the good message")
    assert seen == [("rank0", Pong(rank=0, sequence=7))] and server.rejected == 1


def test_what_was_encoded_once_reaches_several_peers(pair):
    server, client = pair
    other = Client(zmq.Context.instance(), server.address, "rank1", Ping | Notice)
    for rank, one in enumerate((client, other)):
        one.send(Pong(rank=rank, sequence=0))
    there = []
    wait_until([server], lambda: there.extend(server.receive()) or len(there) == 2, 5.0, "both")
    long = server.encode(Notice(text="x" * 3_000_000))
    for _ in range(2):
        for rank in range(2):
            server.send_encoded(f"rank{rank}", long)
    with pytest.raises(ChannelError, match="rank9"):
        server.send_encoded("rank9", long)
    for one in (client, other):
        seen = []
        wait_until([one], lambda one=one, seen=seen: seen.extend(one.receive()) or len(seen) == 2, 5.0, "both messages")
        assert seen == [Notice(text="x" * 3_000_000)] * 2
    other.close()


def test_an_unknown_peer_is_an_error_that_names_it(pair):
    with pytest.raises(ChannelError, match="rank9"):
        pair[0].send("rank9", Ping(sequence=1))


def test_a_wait_ends_by_its_name(pair):
    started = time.monotonic()
    with pytest.raises(ChannelError, match="waited 0.3 s for a miracle"):
        wait_until([pair[0]], lambda: False, 0.3, "a miracle")
    assert time.monotonic() - started < 3
