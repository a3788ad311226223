"""Workers of a machine that come and go by a file: which nodes run, and a job that lives through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.elastic_job import ElasticJob
from pearl.rl.availability import Nodes
from pearl.sched.sim.availability import NodeChange


def change(node: str, add: bool = True) -> NodeChange:
    return NodeChange(at_s=0.0, add=add, node=node)


def test_no_more_run_than_may_and_who_waited_takes_the_place_of_who_left() -> None:
    nodes = Nodes(2)
    for name in "abc":
        nodes.change(change(name))
    assert nodes.starts() == ["a", "b"] and not nodes.starts()
    assert nodes.change(change("a", add=False)) == "a"
    assert not nodes.starts()  # it has its notice, and runs until it has ended
    nodes.ended("a")
    assert nodes.starts() == ["c"]


def test_a_node_that_waited_and_goes_is_nobody_s_loss() -> None:
    nodes = Nodes(1)
    nodes.change(change("a"))
    nodes.change(change("b"))
    assert nodes.starts() == ["a"]
    assert nodes.change(change("b", add=False)) is None
    nodes.ended("a")
    assert nodes.starts() == []


def test_a_worker_that_ended_by_itself_gets_no_other_before_its_node_comes_again() -> None:
    nodes = Nodes(1)
    nodes.change(change("a"))
    nodes.starts()
    nodes.ended("a")
    assert nodes.starts() == []
    nodes.change(change("a"))
    assert nodes.starts() == ["a"]


def test_a_node_that_comes_again_while_its_worker_leaves_gets_another() -> None:
    nodes = Nodes(1)
    nodes.change(change("a"))
    nodes.starts()
    assert nodes.change(change("a", add=False)) == "a"
    nodes.change(change("a"))
    assert nodes.change(change("a", add=False)) is None  # told once: the second time would be an order to end at once
    nodes.change(change("a"))
    assert nodes.starts() == []
    nodes.ended("a")
    assert nodes.starts() == ["a"]


@pytest.mark.slow
def test_a_job_lives_through_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n0,add,n2\n60000,add,n3\n300000,remove,n1\n480000,remove,n2\n")
    with ElasticJob.begin(
        tmp_path, "max_steps=60", f"elastic.trace={trace}", "elastic.speedup=30", "elastic.trace_nodes=2"
    ) as job:
        rows = job.finish()
    said = (job.run / "logs" / "availability.log").read_text()
    assert len(rows) == 60
    assert said.index("n1: joins") < said.index("n1: ended with exit code 0") < said.index("n3: joins")
    assert "n2: ended with exit code 0" in said
    kinds = [row["kind"] for row in job.transitions()]
    assert kinds.count("leave") >= 2 and kinds.count("admit") >= 2
