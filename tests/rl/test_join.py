"""External workers of a job without devices: they join, serve, leave, die, stall and come back; nothing is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.elastic_job import ElasticJob, Wire, kill
from bench.job_process import ROOT
from pearl.config import Config, ElasticOptions, to_json
from pearl.protocol import Joined, Refused, Stop
from pearl.rl import join
from pearl.rl.join import model_folder
from pearl.rl.link import EXIT_LOST, Address

slow = pytest.mark.slow
MANY = "max_steps=400"
"""More than there is time for: the test ends the job."""


def interrupt(job: ElasticJob, signum: int = signal.SIGINT) -> None:
    job.process.send_signal(signum)


def ended(job: ElasticJob, code: int) -> None:
    """The job and all that belongs to it are gone."""
    assert job.wait_until_gone(30) is not None, job.report()
    assert job.process.wait() == code, job.report()


def test_who_does_not_see_the_model_s_folder_has_the_files_that_were_sent(tmp_path: Path) -> None:
    files = {"config.json": "{}", "../outside.json": "{}"}
    joined = Joined(rank=3, config="{}", model_folder=str(tmp_path), weight_version=0, files=files)
    with model_folder(joined) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "outside.json"]
    assert not folder.exists()
    (tmp_path / "config.json").write_text("{}")
    with model_folder(joined) as folder:
        assert folder == tmp_path
    with pytest.raises(ValueError, match="of an engine"), model_folder(joined):
        raise ValueError("of an engine")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_folder_of_the_same_name_may_be_another_model_s(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    files = {"config.json": '{"rope_theta": 10000.0}'} | {name: '{"rope_theta": 1000000.0}'}
    joined = Joined(rank=3, config="{}", model_folder=str(tmp_path), weight_version=0, files=files)
    with model_folder(joined) as folder:
        assert folder != tmp_path and (folder / name).read_text() == files[name]
    (tmp_path / name).write_text(files[name])
    with model_folder(joined) as folder:
        assert folder == tmp_path


class Doors:
    """`Link`s to a job that says these things to who knocks, one after the other; nothing: it has no time. `knocked` counts."""

    def __init__(self, *said: list[Any]) -> None:
        self.knocked, self._said = 0, said
        self.lost, self.answered, self.silence_s, self.stuck_s = "", threading.Event(), 1.0, 1.0
        self.answer: Joined | Refused | None = None
        self.reached, self._then = True, []

    def __call__(self, *_: object) -> Doors:
        self.answer, *self._then = self._said[min(self.knocked, len(self._said) - 1)] or [None]
        self.knocked += 1
        self.answered.set()
        return self

    def take(self, timeout_s: float) -> list[Any]:
        return self._then

    def start(self) -> None: ...
    def close(self) -> None: ...


SOON = Config(elastic=ElasticOptions(reconnect_s=0.05))
TAKEN = Joined(rank=4, config=to_json(SOON), model_folder="", weight_version=0)
AWAY = Stop(number=-1, reason="its GPUs are another's", exit_code=EXIT_LOST)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Doors]]:
    """The exit code of a worker to which a job says these things, and the job."""

    def run(*said: list[Any]) -> tuple[int, Doors]:
        doors = Doors(*said)
        monkeypatch.setattr(join, "Link", doors)
        monkeypatch.setattr(join, "PAUSE_S", 0.01)
        worker = join.External(Address.parse("h:1/t"), notice_s=None, gpus=[])
        worker._options = SOON.elastic
        return worker.run(), doors

    return run


def test_a_worker_that_is_sent_away_each_time_gives_up_and_says_why(
    looks: Callable[..., tuple[int, Doors]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, doors = looks([TAKEN, AWAY])
    assert code == 1 and doors.knocked >= 2
    assert "its GPUs are another's" in capsys.readouterr().out.splitlines()[-1]


def test_a_job_that_is_still_starting_is_waited_for(looks: Callable[..., tuple[int, Doors]]) -> None:
    """Longer than for a job that is not there; what it says in the end counts."""
    code, doors = looks(*[[]] * 30, [Refused(reason="no")])
    assert code == 1 and doors.knocked == 31


@pytest.mark.parametrize(("reached", "words"), [(False, "trying for 0.05 s"), (True, "a job is there but still busy")])
def test_that_nobody_answers_is_said_once_and_soon(
    reached: bool, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the silence is over that makes a link a lost one."""
    doors = Doors([])
    doors.reached = reached
    said: list[str] = []

    class Never:
        def wait(self, timeout_s: float) -> bool:
            said.append(f"{timeout_s:g} s: {capsys.readouterr().out.strip()}")
            return False

    monkeypatch.setattr(doors, "answered", Never())
    worker = join.External(Address.parse("h:1/t"), notice_s=None, gpus=[])
    worker._options = SOON.elastic
    for _ in range(2):
        worker._wait_for_answer(doors)  # type: ignore[arg-type]
    rest = f"{SOON.elastic.silence_s - join.QUIET_S:g} s: "
    assert said == ["2 s: ", f"{rest}pearl join: no answer yet from h:1, {words}", "2 s: ", rest]


def test_a_worker_is_as_patient_with_a_busy_controller_as_the_job_s_own_ranks(looks: Callable[..., tuple[int, Doors]]) -> None:
    _, doors = looks([TAKEN, AWAY])
    assert SOON.elastic.silence_s < SOON.timeouts.silence_s == doors.silence_s


def test_workers_join_serve_die_and_leave_and_nothing_is_lost(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, "max_steps=14") as job:
        job.join("one")
        job.join("two")
        job.serving(2)
        job.step(2)
        kill(job, "one")
        job.wait_for("is gone: silent for elastic.silence_s=5 s", 60)
        job.step(1)
        kill(job, "two", signal.SIGTERM)
        assert job.externals["two"].wait(30) == 0, job.report()
        rows = job.finish(codes={"one": -signal.SIGKILL})
    assert len(rows) == 14
    assert "told to leave" in job.said("two")
    kinds = [row["kind"] for row in job.transitions()]
    assert kinds.count("leave") == 1 and kinds.count("expand") >= 1


def test_a_worker_of_a_job_that_ends_well_ends_well(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, "max_steps=6") as job:
        job.join("one")
        job.serving(1)
        job.finish()
        assert "success" in job.said("one")


@slow
def test_what_is_no_address_or_no_token_is_refused_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pearl.rl.join"]
    (tmp_path / "join_address").write_text("nonsense\n")
    for said in ("nonsense", str(tmp_path / "join_address")):
        done = subprocess.run([*command, said], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "HOST:PORT/TOKEN" in done.stderr
    with ElasticJob.begin(tmp_path, MANY) as job:
        stranger = re.sub(r"/\w+$", "/0123456789abcdef", job.address())
        assert job.join("stranger", stranger).wait(60) == 1
        assert "token" in job.said("stranger")
        job.step(1)
        interrupt(job)
        ended(job, 128 + signal.SIGINT)


@slow
def test_a_stopped_worker_is_lost_and_comes_back_as_another(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, MANY) as job:
        job.join("one")
        job.serving(1)
        job.step(1)
        kill(job, "one", signal.SIGSTOP)
        job.wait_for("is gone: silent", 60)
        job.step(2)
        kill(job, "one", signal.SIGCONT)
        job.serving(2)
        assert "joined as member 4" in job.said("one")
        job.step(1)
        interrupt(job)
        ended(job, 128 + signal.SIGINT)
        assert all(row["lost_tokens"] == 0 for row in job.rows())


@slow
def test_a_cut_wire_costs_the_worker_alone_and_mended_it_joins_again(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, MANY) as job:
        wire = Wire(job.address())
        job.join("one", wire.address)
        job.serving(1)
        wire.cut()
        began = time.monotonic()
        job.wait_for("is gone: silent", 60)
        assert time.monotonic() - began < 30
        job.step(2)
        wire.mend()
        job.serving(2)
        interrupt(job)
        ended(job, 128 + signal.SIGINT)
        wire.close()
        assert all(row["lost_tokens"] == 0 for row in job.rows())


@slow
def test_a_resumed_job_finds_its_workers_again(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, MANY, "save_steps=1", "elastic.reconnect_s=60") as job:
        job.join("one")
        job.serving(1)
        job.step(2)
        controller = job.pid_of("controller")
        assert controller is not None
        job.until(lambda: (job.run / "checkpoints").exists(), "a checkpoint")
        kill_pid(controller)
        assert job.process.wait(30) != 0
        again = ElasticJob.begin(tmp_path, "max_steps=12", resume=job.run)
        with again:
            again.wait_for(" joined from ", 60)
            assert job.externals["one"].wait(120) == 0, job.said("one")
            assert again.process.wait(120) == 0, again.output()
        assert job.said("one").count("joined as member") == 2
        rows = job.rows()
        assert [row["step"] for row in rows] == list(range(1, 13)) and all(row["lost_tokens"] == 0 for row in rows)


def kill_pid(pid: int) -> None:
    subprocess.run(["kill", "-9", str(pid)], check=True)


@slow
def test_a_worker_whose_job_vanished_gives_up_after_a_while(tmp_path: Path) -> None:
    with ElasticJob.begin(tmp_path, MANY) as job:
        job.join("one")
        job.serving(1)
        for pid in [pid for pid, role in job.family().items() if role != "external"]:
            kill_pid(pid)
        assert job.externals["one"].wait(60) == 1
        assert "no job at" in job.said("one")
