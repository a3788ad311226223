"""Silence is counted in time in which the watcher ran."""

from pearl.rl.heartbeat import Heartbeat


def watching(peers, **settings):
    heartbeat = Heartbeat(**settings)
    for peer in peers:
        heartbeat.add(peer)
    return heartbeat


def test_a_silent_peer_is_named_after_its_time_and_a_heard_one_is_not():
    heartbeat = watching([1, 2], every_s=5, silence_s=3, now=0.0)
    for second in range(1, 4):
        heartbeat.heard(1)
        assert heartbeat.advance(float(second)) == []
    heartbeat.heard(1)
    assert heartbeat.advance(4.0) == [2]


def test_a_pause_of_the_watcher_itself_is_not_held_against_its_peers():
    heartbeat = watching([1], every_s=5, silence_s=3, now=0.0)
    assert heartbeat.advance(1000.0) == []
    assert heartbeat.advance(1001.0) == []


def test_pings_are_due_at_once_and_then_at_their_pace():
    heartbeat = watching([1], every_s=2, silence_s=100, now=0.0)
    due = []
    for half_second in range(1, 13):
        heartbeat.advance(half_second / 2)
        due.append(heartbeat.ping_due())
    assert due == [True, False, False, False] * 3
    assert heartbeat.sequence == 3


def test_a_clock_that_goes_back_does_no_harm():
    heartbeat = watching([1], every_s=2, silence_s=3, now=10.0)
    assert heartbeat.advance(5.0) == []
