"""The main loop carries out commands in number order, steps its engine between them, and answers for failures."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pearl.protocol import (
    Abort,
    Checkpoint,
    Done,
    Failed,
    NewRequest,
    PackingPlan,
    Publish,
    SamplingParams,
    Serve,
    SetReference,
    Stop,
    Submit,
    Tokens,
    TrainStep,
)
from pearl.rl.rank import RankLoop


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

    def abort(self, request_id):
        return self.live.pop(request_id, None) is not None

    def has_unfinished(self):
        return bool(self.live)

    def stats(self):
        return SimpleNamespace(waiting=0, running=len(self.live), free_blocks=7)


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


def run(*batches):
    log, port = [], Port(*batches)
    loop = RankLoop(
        rank=0,
        control=port,
        engine=ScriptedEngine(log),
        trainer=ScriptedTrainer(log),
        publish=lambda version: log.append(("publish", version)) or {"bytes": 8},
    )
    return loop, loop.run(), port.sent, log


def train(number, step=1):
    return TrainStep(
        number=number, step=step, objective="policy", sequences=[], plan=PackingPlan(updates=[]), weight_version=0
    )


def submit(name, prompt):
    return Submit(requests=[NewRequest(request_id=name, prompt_token_ids=prompt, params=SamplingParams(seed=1))])


def test_commands_run_in_order_and_are_answered():
    commands = [train(0), SetReference(number=1), Publish(number=2, version=4), Checkpoint(number=3, path="p", step=1)]
    loop, code, sent, log = run(commands)
    assert (code, loop.stop_reason) == (0, "end of script")
    assert log == [("train", 1), ("reference",), ("publish", 4), ("save", "p")]
    assert [(event.number, event.metrics) for event in sent if isinstance(event, Done)] == [
        (0, {"loss": 0.5}), (1, {}), (2, {"bytes": 8}), (3, {}),
    ]  # fmt: skip


def test_the_engine_steps_only_while_serving_and_every_token_is_sent():
    _, _, sent, log = run([submit("a", [10])], [Serve(number=0)], [submit("b", [20])], [], [], [])
    steps = [entry for entry in log if entry[0] == "step"]
    assert steps[:2] == [("step", ("a",)), ("step", ("a", "b"))]
    tokens = [(update.request_id, *update.token_ids) for event in sent if isinstance(event, Tokens) for update in event.updates]
    assert [token for name, token in tokens if name == "a"] == [11, 12, 13]
    assert [token for name, token in tokens if name == "b"] == [21, 22, 23]


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
    assert loop.stop_reason == sent[0].error


@pytest.mark.parametrize("numbers", [(1,), (0, 2), (0, 0)])
def test_a_command_out_of_order_is_never_carried_out(numbers):
    _, code, sent, log = run([Publish(number=number, version=number) for number in numbers])
    assert code == 1
    assert isinstance(sent[-1], Failed)
    assert "number order" in sent[-1].error
    assert len(log) == len(numbers) - 1


def test_nothing_runs_after_stop():
    _, code, _, log = run([Stop(number=0, reason="enough", exit_code=3), train(1)])
    assert code == 3
    assert log == []
