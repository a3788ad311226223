"""The main loop carries out commands in number order, steps its engine between them, and answers for failures."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pearl.protocol import (
    Abort,
    Checkpoint,
    Done,
    Export,
    Failed,
    Fetch,
    NewRequest,
    PackingPlan,
    Publish,
    Report,
    Restore,
    SamplingParams,
    Serve,
    SetReference,
    Stop,
    Submit,
    Tokens,
    TrainStep,
    Wake,
    packed,
)
from pearl.rl.rank import RankLoop
from pearl.rl.serving import Serving


class Port:
    """A controller that sends one prepared batch of messages per `take`, then stops the rank."""

    def __init__(self, *batches):
        self.batches = list(batches)
        self.sent = []

    def take(self, timeout_s):
        return self.batches.pop(0) if self.batches else [Stop(number=99, reason="end of script", exit_code=0)]

    def send(self, event):
        self.sent.append(event)


@dataclass
class ScriptedEngine:
    """Gives each request one token per step, three in all; token = last prompt id + count."""

    log: list
    live: dict = field(default_factory=dict)
    asleep: bool = False
    weight_version: int = 0

    def add_request(self, prompt, params, request_id=None, **options):
        if not prompt:
            raise ValueError("prompt_token_ids=[]: must not be empty")
        self.live[request_id] = [prompt[-1], 0]
        return request_id

    def step_updates(self):
        self.log.append(("step", tuple(self.live)))
        updates = []
        for name, state in list(self.live.items()):
            state[1] += 1
            done = SimpleNamespace(finish_reason="length", error=None, num_cached_tokens=0) if state[1] == 3 else None
            updates.append(
                SimpleNamespace(
                    request_id=name, token_ids=(state[0] + state[1],), logprobs=(-1.0,), weight_versions=(0,), completion=done
                )
            )
            if done:
                del self.live[name]
        return updates

    def discard(self, request_id):
        return self.live.pop(request_id, None) is not None

    def has_unfinished(self):
        return bool(self.live)

    def take_handoffs(self):
        return []

    def stats(self):
        blocks = {"free_blocks": 7, "total_blocks": 9, "used_blocks": 2, "leased_blocks": 0, "num_computed_tokens": 0}
        return SimpleNamespace(waiting=0, running=len(self.live), weight_version=0, **blocks)


class ScriptedTrainer:
    def __init__(self, log):
        self.log = log

    def train_step(self, command):
        self.log.append(("train", command.step))
        if command.step == 13:
            raise FloatingPointError("loss is nan at step 13")
        return {"loss": 0.5}

    def set_reference(self):
        self.log.append(("reference",))

    def save(self, path):
        self.log.append(("save", path))

    def save_state(self, path):
        self.log.append(("save state", path))

    def load_state(self, path):
        self.log.append(("load state", path))


class ScriptedPublisher:
    """Is through with a publish at the n-th poll."""

    def __init__(self, log, polls):
        self.log, self.polls, self.version, self.left = log, polls, None, 0

    def begin(self, version):
        assert self.version is None, "a publish began before the one before it was through"
        self.version, self.left = version, self.polls
        self.log.append(("begin", version))

    def poll(self):
        self.left -= 1
        return self._end() if self.left <= 0 else None

    def wait(self, timeout_s):
        self.log.append(("wait", self.version))
        return self._end()

    def _end(self):
        self.log.append(("publish", self.version))
        self.version = None
        return {"bytes": 8}


def run(*batches, polls=1, trains=True, serves=True, report_s=0.0):
    log, port = [], Port(*batches)
    loop = RankLoop(
        rank=0,
        control=port,
        engine=ScriptedEngine(log) if serves else None,
        trainer=ScriptedTrainer(log) if trains else None,
        publisher=ScriptedPublisher(log, polls),
        publish_timeout_s=5.0,
        report_s=report_s,
    )
    return loop, loop.run(), port.sent, log


def train(number, step=1):
    return TrainStep(
        number=number, step=step, objective="policy", sequences=[], plan=PackingPlan(updates=[]), weight_version=0
    )


def submit(name, prompt):
    return Submit(requests=[NewRequest(request_id=name, prompt=packed(prompt), params=SamplingParams(seed=1))])


def test_commands_run_in_order_and_are_answered():
    commands = [
        train(0), SetReference(number=1), Publish(number=2, version=4), Checkpoint(number=3, path="p", step=1),
        Export(number=5, path="q"), Restore(number=8, path="r"),
    ]  # fmt: skip
    loop, code, sent, log = run(commands)
    assert (code, loop.stop_reason) == (0, "end of script")
    steps = [("train", 1), ("reference",), ("begin", 4), ("publish", 4)]
    assert log == [*steps, ("save state", "p"), ("save", "q"), ("load state", "r")]
    assert [(event.number, event.metrics) for event in sent if isinstance(event, Done)] == [
        (0, {"loss": 0.5}), (1, {}), (2, {"bytes": 8}), (3, {}), (5, {}), (8, {}),
    ]  # fmt: skip


def test_serving_goes_on_while_a_publish_is_under_way():
    first = [Serve(number=0), submit("a", [10]), Publish(number=1, version=1)]
    _, code, sent, log = run(first, [], [], [], [], polls=3)
    assert code == 0
    assert log.index(("begin", 1)) < log.index(("step", ("a",))) < log.index(("publish", 1))
    assert ("wait", 1) not in log
    kinds = [type(event) for event in sent]
    assert kinds.index(Tokens) < len(kinds) - 1 - kinds[::-1].index(Done)


def test_other_commands_wait_for_a_publish_under_way():
    _, _, sent, log = run([Publish(number=0, version=1), train(1)], polls=1000)
    assert log == [("begin", 1), ("wait", 1), ("publish", 1), ("train", 1)]
    assert [event.number for event in sent if isinstance(event, Done)] == [0, 1]


@pytest.mark.parametrize(("message", "missing"), [("train", {"trains": False}), ("serve", {"serves": False})])
def test_a_command_for_another_kind_of_rank_is_an_error(message, missing):
    _, code, sent, _ = run([train(0) if message == "train" else Serve(number=0)], **missing)
    assert code == 1
    assert f"does not {message}" in sent[-1].error


def test_the_engine_steps_only_while_serving_and_every_token_is_sent():
    _, _, sent, log = run([submit("a", [10])], [Serve(number=0)], [submit("b", [20])], [], [], [])
    steps = [entry for entry in log if entry[0] == "step"]
    assert steps[:2] == [("step", ("a",)), ("step", ("a", "b"))]
    tokens = [(update.request_id, *update.token_ids) for event in sent if isinstance(event, Tokens) for update in event.updates]
    assert [token for name, token in tokens if name == "a"] == [11, 12, 13]
    assert [token for name, token in tokens if name == "b"] == [21, 22, 23]


def test_tokens_wait_for_an_end_or_their_time_and_the_end_brings_all_of_its_request():
    _, _, sent, _ = run([Serve(number=0), submit("a", [10])], [], [submit("b", [20])], [], [], [], report_s=1e9)
    updates = [update for event in sent if isinstance(event, Tokens) for update in event.updates]
    told = [(one.request_id, *one.token_ids, one.finish_reason) for one in updates]
    assert told == [("a", 11, None), ("a", 12, 13, "length"), ("b", 21, 22, 23, "length")], "the very first at once"
    _, _, sent, _ = run([Serve(number=0), submit("a", [10])], [Abort(request_ids=["a"])], [], report_s=1e9)
    assert [event.updates[0].token_ids for event in sent if isinstance(event, Tokens)] == [[11]]


def test_a_members_numbers_come_with_tokens_or_when_there_are_none_for_long():
    sent = []
    serving = Serving(0, ScriptedEngine([]), sent.append)
    serving.active = True
    told = []
    for now, steps in [(100.0, 0), (101.5, 0), (101.6, 1), (102.5, 1), (103.5, 0), (103.7, 0)]:
        if steps == 1 and not serving.has_work:
            serving.take(submit("a", [10]))
        for _ in range(steps):
            serving.step()
        serving.report(now)
        told += [now for event in sent if isinstance(event, Report)]
        sent.clear()
    assert told == [100.0, 101.6, 103.7]


def test_a_refused_request_costs_itself_only():
    _, code, sent, _ = run([Serve(number=0), submit("bad", []), submit("good", [1])], [], [], [])
    assert code == 0
    updates = [update for event in sent if isinstance(event, Tokens) for update in event.updates]
    refused = [update for update in updates if update.request_id == "bad"]
    assert len(refused) == 1
    assert refused[0].finish_reason == "error"
    assert "must not be empty" in refused[0].error
    assert [update.finish_reason for update in updates if update.request_id == "good"] == [None, None, "length"]


def test_an_abort_reaches_the_engine():
    _, _, sent, _ = run([Serve(number=0), submit("a", [1]), Abort(request_ids=["a", "unknown"])], [])
    assert not [event for event in sent if isinstance(event, Tokens)]


def test_a_failure_is_reported_once_with_its_cause_and_ends_the_rank():
    loop, code, sent, log = run([train(0, step=13), Publish(number=1, version=1)])
    assert code == 1
    assert [type(event) for event in sent] == [Failed]
    assert "loss is nan at step 13" in sent[0].error
    assert "train_step" in sent[0].traceback
    assert ("publish", 1) not in log
    assert loop.traceback == sent[0].traceback


def test_a_failed_rank_takes_the_first_cause_from_the_controller():
    verdict = Stop(number=5, reason="rank 3 died", exit_code=1)
    loop, code, _, _ = run([train(0, step=13)], [verdict])
    assert (loop.stop_reason, code) == ("rank 3 died", 1)


@pytest.mark.parametrize("numbers", [(1, 0), (3, 7, 7)])
def test_a_command_out_of_order_is_never_carried_out(numbers):
    _, code, sent, log = run([Publish(number=number, version=number) for number in numbers])
    assert code == 1
    assert isinstance(sent[-1], Failed)
    assert "number order" in sent[-1].error
    assert len([entry for entry in log if entry[0] == "publish"]) == len(numbers) - 1


def test_nothing_runs_after_stop():
    _, code, _, log = run([Stop(number=0, reason="enough", exit_code=3), train(1)])
    assert code == 3
    assert log == []


def test_a_fetch_behind_an_order_that_is_overtaken_is_begun_all_the_same() -> None:
    """The first `Wake` waits for its version; another comes, for which there is nothing to wait."""
    numbers = dict.fromkeys(("total_blocks", "used_blocks", "leased_blocks", "running", "waiting", "weight_version"), 0)
    stats = SimpleNamespace(role="mixed", **numbers)
    engine = SimpleNamespace(weight_version=0, asleep=False, stats=lambda: stats, has_unfinished=lambda: False)
    asked: list[int] = []
    came: list[dict[str, float]] = []
    fetcher = SimpleNamespace(
        begin=lambda version, pulls: asked.append(version), poll=lambda: came[0] if came else None, cancel=lambda: None
    )
    waits: list[list] = [
        [Wake(number=1, role="mixed", epoch=1, weight_version=1)],
        [Fetch(number=2, weight_version=2)],
        [Wake(number=3, role="mixed", epoch=2, weight_version=0)],
    ]
    sent: list = []
    port = SimpleNamespace(take=lambda timeout_s: waits.pop(0) if waits else [], send=sent.append)
    loop = RankLoop(
        rank=5, control=port, engine=engine, trainer=None, publisher=SimpleNamespace(), publish_timeout_s=1.0, fetcher=fetcher
    )
    for _ in range(4):
        loop.turn()
    assert asked == [1, 2]
    came.append({})
    loop.turn()
    assert [event.number for event in sent if isinstance(event, Done)] == [3, 2]
