"""Late, borrowed and recovering workers: a version from a snapshot or from a peer, whatever becomes of the other side."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import hf_models
import pytest
import torch
from pull_member import PullMember
from weight_cases import EMBEDDING, HEAD, Q, config_of, is_model, new_decoder, snapshot, tensors_of, unchanged

from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.comm.conversation import Conversation, pair_over
from pearl.engine.models.params import hf_shapes
from pearl.engine.weights.conversation import Answer, Ask, Report
from pearl.engine.weights.fanout import Member, plan_fanout
from pearl.engine.weights.holding import HoldingBusy, LiveHolding, SnapshotHolding
from pearl.engine.weights.pull import Holder, SnapshotReceiver, fetch, load, pull
from pearl.engine.weights.pull_server import PullServer
from pearl.engine.weights.snapshot import Snapshot, digest_of

MODEL = hf_models.dense()
CONFIG, TENSORS = config_of(MODEL), tensors_of(MODEL)
BUCKET = 4096
TIMEOUT_S = 2.0


def new_snapshot(config=CONFIG, dtype=torch.float32, bucket_bytes=BUCKET) -> Snapshot:
    return Snapshot(config, dtype, bucket_bytes=bucket_bytes)


def written(version: int, tensors=TENSORS, config=CONFIG) -> Snapshot:
    made = new_snapshot(config)
    assert made.write(tensors, version)
    return made


def in_order(tensors=TENSORS, config=CONFIG) -> list:
    return [(name, dict(tensors)[name]) for name in hf_shapes(config)]


def serve(kept: Snapshot, **options) -> PullServer:
    return PullServer(SnapshotHolding(kept.reader()), **{"timeout_s": TIMEOUT_S, **options})


def holder(server: PullServer, name: str = "server") -> Holder:
    return Holder(name=name, port=server.port)


def get(into: Snapshot, *servers: PullServer, version: int | None = None, total: float = 20.0, name: str = "me"):
    holders = [holder(server, f"h{number}") for number, server in enumerate(servers)]
    return fetch(into, holders, name=name, version=version, total_timeout_s=total, timeout_s=TIMEOUT_S)


def until(condition, what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


@pytest.fixture
def server() -> Iterator[PullServer]:
    with closing(serve(written(3))) as made:
        yield made


class Target:
    """As much of an Engine as weights go through."""

    def __init__(self, config=CONFIG) -> None:
        self.decoder, self.store = new_decoder(config)
        self.stage_weights, self.discard_weights = self.store.stage, self.store.discard

    @property
    def weight_version(self) -> int:
        return self.store.version

    def commit_weights(self, version: int, mode: str = "keep") -> None:
        assert self.store.staged_version == version
        self.store.commit()


def test_a_late_worker_serves_what_the_snapshot_had(server: PullServer) -> None:
    target, mine = Target(), new_snapshot()
    report = pull(target, mine, [holder(server)], name="late", timeout_s=TIMEOUT_S)
    assert (report.version, report.holder, report.failures) == (3, "server", {})
    assert target.weight_version == 3 and is_model(target.decoder, MODEL)
    until(lambda: server.stats.served == 1, "the report")
    assert server.stats.nbytes == report.nbytes and not server.stats.dropped
    other = Target()  # the next one on this node asks nobody
    assert pull(other, mine, [holder(server)], name="second", version=3).holder is None
    assert is_model(other.decoder, MODEL) and server.stats.served == 1


def test_a_worker_gives_on_the_weights_that_it_serves() -> None:
    plan = new_snapshot().plan
    live = LiveHolding(plan, lambda: iter(in_order()), lambda: 5)
    with closing(PullServer(live, timeout_s=TIMEOUT_S)) as peer:
        target = Target()
        assert pull(target, new_snapshot(), [holder(peer, "peer")], name="joiner").version == 5
        until(lambda: peer.stats.served == 1, "the report")
    assert is_model(target.decoder, MODEL) and not peer.stats.dropped


def test_weights_that_change_under_a_transfer_are_refused_in_words() -> None:
    plan, into = new_snapshot().plan, new_snapshot()

    def changed_on_the_way() -> Iterator:
        for number, pair in enumerate(in_order()):
            if number == 9:
                with live.changing():
                    pass
            yield pair

    live = LiveHolding(plan, changed_on_the_way, lambda: 5)
    with closing(PullServer(live, timeout_s=TIMEOUT_S)) as peer, closing(serve(written(5))) as other:
        with pytest.raises(CollectiveError, match="h0: version 5 is giving way to the next one here"):
            get(into, peer, version=5)
        assert into.versions == () and not peer.stats.dropped
        report = get(into, peer, other, version=5)
    assert report.holder == "h1" and "giving way" in report.failures["h0"] and into.versions == (5,)


def test_a_source_that_breaks_off_is_told_in_its_words() -> None:
    def broken() -> Iterator:
        yield from in_order()[:4]
        raise RuntimeError("the device is lost")

    into = new_snapshot()
    with closing(PullServer(LiveHolding(into.plan, broken, lambda: 5), timeout_s=TIMEOUT_S)) as peer:
        with pytest.raises(CollectiveError, match="h0: the device is lost"):
            get(into, peer)
        until(lambda: peer.stats.problem == "the device is lost", "the books")
        assert not peer.stats.dropped and into.versions == ()


def test_nan_is_told_by_name_and_the_next_holder_is_asked() -> None:
    bad = [(name, value.clone()) for name, value in in_order()]
    dict(bad)[Q][3, 3] = float("nan")
    with pytest.raises(ValueError, match=f"{Q}: 1 of .* values are not finite"):
        written(5, bad)
    live, into = LiveHolding(new_snapshot().plan, lambda: iter(bad), lambda: 5), new_snapshot()
    with closing(PullServer(live, timeout_s=TIMEOUT_S)) as peer, closing(serve(written(5))) as good:
        report = get(into, peer, good)
        assert report.holder == "h1" and f"{Q}: 1 of" in report.failures["h0"] and not peer.stats.dropped


@pytest.mark.parametrize("lie", ["changed bit", "sealed nan"])
def test_a_holder_that_lies_is_found_out(lie: str) -> None:
    liar, into, honest = written(5), new_snapshot(), written(5)
    messages = liar._messages[0]
    if lie == "changed bit":
        messages[4].data[5] += 1.0
    else:
        messages[4].data[0] = float("inf")
        messages[4].seal(5)
    with closing(serve(liar)) as bad, closing(serve(honest)) as good:
        report = get(into, bad, good, version=5)
        assert ("checksum differs" if lie == "changed bit" else "not finite") in report.failures["h0"]
        assert report.holder == "h1" and into.versions == (5,)
        until(lambda: bad.stats.drops == 1, "the receiver that gave up")
        assert "me" in bad.stats.dropped and bad.stats.served == 0


def _renamed_or_misshaped(kind: str) -> dict:
    return {
        "shape": {"config": config_of(hf_models.dense(intermediate_size=64))},
        "name": {"config": config_of(hf_models.dense(num_hidden_layers=3))},
        "dtype": {"dtype": torch.bfloat16},
        "bucket": {"bucket_bytes": 8192},
    }[kind]


@pytest.mark.parametrize("kind", ["shape", "name", "dtype", "bucket"])
def test_another_model_is_refused_before_a_byte_goes(server: PullServer, kind: str) -> None:
    into = new_snapshot(**_renamed_or_misshaped(kind))
    words = "takes bfloat16, float32 is sent" if kind == "dtype" else "differ from those here in name, shape"
    with pytest.raises(CollectiveError, match=words):
        get(into, server, name="stranger")
    until(lambda: "stranger" in server.stats.dropped, "the books")
    assert into.versions == () and words in server.stats.dropped["stranger"]
    assert get(new_snapshot(), server).version == 3


def test_the_wrong_tensors_never_become_a_version() -> None:
    kept = written(1)
    cases = {
        "the model has no such tensor": [(f"{name}x" if name == Q else name, value) for name, value in TENSORS],
        "must be": [(name, value[1:] if name == Q else value) for name, value in TENSORS],
        "1 of .* tensors are missing": TENSORS[:-1],
        "arrived twice": [*TENSORS, TENSORS[0]],
    }
    for words, tensors in cases.items():
        with pytest.raises(ValueError, match=words):
            kept.write(tensors, 2)
        assert kept.versions == (1,)
    with pytest.raises(ValueError, match="must be greater than 1"):
        kept.write(TENSORS, 1)
    assert kept.write(list(reversed(TENSORS)), 2)  # the order of arrival does not matter


def test_tied_embeddings_travel_once() -> None:
    model = hf_models.dense(tie_word_embeddings=True)
    config = config_of(model)
    tensors = tensors_of(model)
    embedding = dict(tensors)[EMBEDDING]
    kept = written(1, [(HEAD, embedding.clone()), *tensors], config)
    with pytest.raises(ValueError, match=f"{HEAD}: differs from {EMBEDDING}"):
        kept.write([*tensors, (HEAD, embedding + 1)], 2)
    with closing(serve(kept)) as server:
        target = Target(config)
        assert pull(target, new_snapshot(config), [holder(server)], name="tied").version == 1
    assert is_model(target.decoder, model)
    assert HEAD not in {name for name, *_ in kept.reader().lease(1).rows()}


def test_version_skew(server: PullServer) -> None:
    kept, into = written(3), new_snapshot()
    with closing(serve(kept)) as source:
        kept.write(TENSORS, 4)
        kept.write(TENSORS, 5)
        with pytest.raises(CollectiveError, match="h0: version=3: the snapshot has 4, 5"):
            get(into, source, version=3)
        threading.Timer(0.4, lambda: kept.write(TENSORS, 6)).start()
        assert get(into, source, version=6).version == 6  # it waits for a version that is on its way
        start = time.monotonic()
        with pytest.raises(CollectiveError, match="me: a version after 6 came from nobody .* version 6 is the newest here"):
            get(into, source, total=0.5)
        assert time.monotonic() - start < 3.0
        with pytest.raises(ValueError, match="version=2: must be greater than 6, the newest in the snapshot here"):
            get(into, source, version=2)
        target = Target()
        load(target, into.reader(), adopt=False)
        before = snapshot(target.decoder)
        with pytest.raises(ValueError, match="must be greater than 6"):
            load(target, into.reader())
        assert target.weight_version == 6 and unchanged(target.decoder, before)


@pytest.mark.parametrize("lie", ["digest", "version", "generation"])
def test_a_receiver_that_lies_is_dropped_by_name(server: PullServer, lie: str) -> None:
    into = new_snapshot()
    conversation = Conversation.begin(server.host, server.port, TIMEOUT_S)
    ask = Ask(name="liar", version=3, present=-1, dtype="float32", plan=into.plan.fingerprint)
    conversation.say(ask, TIMEOUT_S)
    answer = conversation.hear(Answer, TIMEOUT_S)
    pair = pair_over(conversation, 1, answer.generation, TIMEOUT_S)
    receiver, draft = SnapshotReceiver(pair.comm, into, TIMEOUT_S), into.draft(3)
    receiver.receive(draft)
    while not receiver.finished:
        receiver.poll()
    truth = {"version": 3, "generation": answer.generation, "digest": digest_of(draft.messages)}
    conversation.say(Report(**{**truth, lie: truth[lie] + 1}), TIMEOUT_S)
    until(lambda: server.stats.drops == 1, "the liar to be dropped")
    assert "were sent" in server.stats.dropped["liar"] and server.stats.served == 0
    pair.close(settled=True)
    assert get(new_snapshot(), server).version == 3


def test_who_talks_nonsense_or_nothing_costs_nobody_else(server: PullServer) -> None:
    silent = socket.create_connection((server.host, server.port))
    noisy = socket.create_connection((server.host, server.port))
    noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert get(new_snapshot(), server).version == 3
    until(lambda: server.stats.drops == 2, "both to be dropped", TIMEOUT_S + 3)
    assert get(new_snapshot(), server).version == 3
    silent.close()
    noisy.close()


def test_who_comes_when_no_thread_is_to_be_had_is_sent_away_and_the_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def once(thread: threading.Thread) -> None:
        if thread.name == "pull receiver" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", once)
    with closing(serve(written(3))) as server, closing(Conversation.begin(server.host, server.port, TIMEOUT_S)) as first:
        until(first.gone, "the first to be sent away")
        assert get(new_snapshot(), server).version == 3


def test_who_comes_to_a_generation_that_is_over_is_refused(server: PullServer) -> None:
    assert get(new_snapshot(), server).version == 3
    conversation = Conversation.begin(server.host, server.port, TIMEOUT_S)
    plan = new_snapshot().plan
    conversation.say(Ask(name="ghost", version=3, present=-1, dtype="float32", plan=plan.fingerprint), TIMEOUT_S)
    assert conversation.hear(Answer, TIMEOUT_S).generation == 2
    with pytest.raises(CollectiveError, match="generation 2 came, this is generation 1"):
        pair_over(conversation, 1, 1, TIMEOUT_S)
    until(lambda: "ghost" in server.stats.dropped, "the ghost to be dropped")
    assert server.stats.dropped["ghost"] == "generation 1 came, this is generation 2"


def test_when_all_slots_are_taken_the_next_holder_is_asked_and_then_the_first_again(server: PullServer) -> None:
    taken, into = [server._slots.acquire(blocking=False) for _ in range(2)], new_snapshot()
    assert taken == [True, True]
    with closing(serve(written(3))) as other:
        report = get(into, server, other)
        assert report.holder == "h1" and report.failures == {"h0": "all slots are taken"}
    threading.Timer(0.3, server._slots.release).start()
    assert get(new_snapshot(), server).version == 3


def test_one_version_is_held_at_a_time_where_the_writer_needs_the_other_slot() -> None:
    kept = written(1)
    holding = SnapshotHolding(kept.reader(), versions=1)
    first, second = holding.hold(1), holding.hold(1)
    assert kept.write(TENSORS, 2, wait_s=0.0)
    with closing(PullServer(holding, timeout_s=TIMEOUT_S)) as server:
        threading.Timer(0.3, second.close).start()
        with pytest.raises(HoldingBusy, match="version=2: 1 is still being sent"):
            holding.hold(2)
        first.close()
        start = time.monotonic()
        assert get(new_snapshot(), server, version=2).version == 2  # it is asked again until the other is through
        assert time.monotonic() - start > 0.1 and server.stats.refused > 0
    assert kept.write(TENSORS, 3, wait_s=0.0) and kept.write(TENSORS, 4, wait_s=0.0)


def test_a_holder_that_is_gone_or_stopped_costs_its_timeout() -> None:
    stopped = socket.create_server(("127.0.0.1", 0))  # connections are made for it, and never read
    gone = socket.create_server(("127.0.0.1", 0))
    ports = [server.getsockname()[1] for server in (stopped, gone)]
    gone.close()
    start = time.monotonic()
    with pytest.raises(CollectiveError, match="stopped: waiting for Answer: it did not come within 0.5 s; gone: .*refused"):
        holders = [Holder(name="stopped", port=ports[0]), Holder(name="gone", port=ports[1])]
        fetch(new_snapshot(), holders, name="me", timeout_s=0.5)
    assert time.monotonic() - start < 4.0


BIG = hf_models.dense(vocab_size=8192, hidden_size=384)
"""More than what the sockets of two processes hold between them."""


BIG_CONFIG = config_of(BIG)
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP


def big_snapshot() -> Snapshot:
    return new_snapshot(BIG_CONFIG, bucket_bytes=1 << 20)


def test_receivers_that_die_or_stop_are_dropped_by_name_and_the_rest_go_on() -> None:
    kept = big_snapshot()
    kept.write(tensors_of(BIG), 7)
    cases = {"killed early": (KILLED, 0), "killed late": (KILLED, 5), "stopped": (STOPPED, 5), "well": None}
    with ExitStack() as stack, closing(serve(kept, slots=5)) as server, longest_pause() as pause:
        members = {name: PullMember(kept.plan, name, 7, port=server.port, fails=way) for name, way in cases.items()}
        for member in members.values():
            stack.enter_context(member)
            assert member.hear() == "ready"
        start = time.monotonic()
        for member in members.values():
            member.pipe.send("go")
        assert get(big_snapshot(), server).version == 7
        assert members["well"].hear() == kept.reader().lease(7).digest
        until(lambda: server.stats.drops == 3 and server.stats.served == 2, "all five", 15.0)
        assert set(server.stats.dropped) == {"killed early", "killed late", "stopped"}
        assert time.monotonic() - start < 5 * TIMEOUT_S
        assert pause[0] < TIMEOUT_S / 2  # nobody who works in the server's process was held up
        assert get(big_snapshot(), server).version == 7  # and its slots are free again


def test_a_holder_that_stops_or_dies_half_way_spoils_nothing_even_when_it_wakes_again() -> None:
    good, into = big_snapshot(), big_snapshot()
    good.write(tensors_of(BIG), 7)
    other = [(name, value + 1.0) for name, value in tensors_of(BIG)]
    with ExitStack() as stack, closing(serve(good)) as server:
        ways = {"stopped": (STOPPED, 4), "killed": (KILLED, 4)}
        members = {n: stack.enter_context(PullMember(good.plan, n, 7, tensors=other, fails=way)) for n, way in ways.items()}
        asked = [*(Holder(name=name, port=member.hear()) for name, member in members.items()), holder(server)]
        start = time.monotonic()
        report = fetch(into, asked, name="me", version=7, timeout_s=TIMEOUT_S)
        assert report.holder == "server" and set(report.failures) == {"stopped", "killed"}
        assert time.monotonic() - start < 5 * TIMEOUT_S
        os.kill(members["stopped"].process.pid, signal.SIGCONT)
        time.sleep(0.3)
        with into.reader().lease(7) as lease:
            lease.check()
            assert lease.digest == good.reader().lease(7).digest


@contextmanager
def longest_pause() -> Iterator[list[float]]:
    """How long, at most, a thread that does next to nothing had to wait for the interpreter."""
    pause, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not over.wait(0.01):
            last, before = time.monotonic(), last
            pause[0] = max(pause[0], last - before)

    ticking = threading.Thread(target=tick)
    ticking.start()
    yield pause
    over.set()
    ticking.join()


def test_fifty_versions_leave_no_memory_behind() -> None:
    kept, into, target = new_snapshot(), new_snapshot(), Target()
    threads, sizes = threading.active_count(), []
    with closing(serve(kept)) as server:
        for version in range(50):
            shifted = [(name, value + version * 1e-6) for name, value in TENSORS]
            assert kept.write(shifted, version)
            assert pull(target, into, [holder(server)], name="worker", version=version).version == version
            assert target.weight_version == version
            sizes.append((_resident_kib(), len(os.listdir("/proc/self/fd"))))
        until(lambda: server.stats.served == 50, "the last report")
    until(lambda: threading.active_count() <= threads, "all threads to end")
    assert torch.equal(target.decoder.lm_head.weight.detach(), dict(shifted)[HEAD]) and not server.stats.dropped
    assert sizes[-1][0] - sizes[9][0] < 3000 and sizes[-1][1] < sizes[9][1] + 20  # one file a version would be 40


def _resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_eight_late_joiners_cost_the_trainers_node_one_copy() -> None:
    """All start at once; the tree alone says who asks whom."""
    kept = written(3)
    joiners = [Member(name=f"worker {number}", node=f"spot {number}") for number in range(8)]
    plan = plan_fanout([Member(name="trainer", node="t", version=3, trains=True), *joiners])
    servers, snapshots, reports, errors = {"trainer": serve(kept)}, {}, {}, []
    for joiner in joiners:
        snapshots[joiner.name] = new_snapshot()
        servers[joiner.name] = serve(snapshots[joiner.name])

    def join(name: str, sources: tuple[str, ...]) -> None:
        try:
            asked = [holder(servers[source], source) for source in sources]
            waits = {"total_timeout_s": 30.0, "timeout_s": TIMEOUT_S, "patience_s": 20.0}
            reports[name] = fetch(snapshots[name], asked, name=name, version=3, **waits)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(a.receiver, a.sources)) for a in plan.assignments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    until(lambda: sum(server.stats.served for server in servers.values()) == 8, "the last report")
    for server in servers.values():
        server.close()
    trainer = servers["trainer"].stats
    assert not errors and len(reports) == 8
    assert {snapshots[name].reader().lease(3).digest for name in reports} == {kept.reader().lease(3).digest}
    assert trainer.nbytes == reports["worker 0"].nbytes == sum(s.stats.nbytes for s in servers.values()) // 8
    assert trainer.cpu_s < 0.2 and max(a.depth for a in plan.assignments) == 4


def test_settings_that_make_no_sense_are_refused(server: PullServer) -> None:
    for wrong in ({"slots": 0}, {"timeout_s": 0.0}, {"slowest_bytes_per_s": 0.0}):
        with pytest.raises(ValueError, match="must be > 0"):
            serve(written(1), **wrong)
    with pytest.raises(ValueError, match="must name somebody"):
        fetch(new_snapshot(), [], name="me")


def test_a_receiver_that_is_too_slow_is_dropped() -> None:
    kept = written(3)
    with closing(serve(kept, timeout_s=0.6, slowest_bytes_per_s=1e12)) as strict:
        slow = SnapshotReceiver.poll
        start = time.monotonic()
        try:
            SnapshotReceiver.poll = lambda self: (time.sleep(0.3), slow(self))[1]
            with pytest.raises(CollectiveError):
                fetch(new_snapshot(), [holder(strict)], name="slow", timeout_s=TIMEOUT_S)
        finally:
            SnapshotReceiver.poll = slow
        until(lambda: "slow" in strict.stats.dropped, "the books")
        assert time.monotonic() - start < 10
