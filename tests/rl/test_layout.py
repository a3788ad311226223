"""Which rank does what, for every size of a job."""

from __future__ import annotations

import pytest

from pearl.config import resolve
from pearl.overrides import override
from pearl.rl.layout import JobLayout
from pearl.rl.recipes.quickstart import recipe


def of(world: int, train_ranks: int | None = None) -> JobLayout:
    settings = [] if train_ranks is None else [f"cluster.train_ranks={train_ranks}"]
    return JobLayout.of(resolve(override(recipe(), settings), world), world)


def test_one_rank_takes_turns() -> None:
    layout = of(1)
    assert (layout.takes_turns, layout.training, layout.serving, layout.publish_members) == (True, range(1), range(1), (0,))
    assert layout.roles(0) == ["train", "serve"]


@pytest.mark.parametrize(("world", "training"), [(2, 1), (3, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 16)])
def test_a_quarter_trains_unless_told_otherwise(world: int, training: int) -> None:
    assert of(world).training == range(training)


@pytest.mark.parametrize("world", range(2, 9))
def test_every_rank_has_one_role_and_every_server_gets_weights(world: int) -> None:
    for train_ranks in range(1, world):
        layout = of(world, train_ranks)
        assert not layout.takes_turns
        assert [*layout.training, *layout.serving] == list(range(world))
        assert len(layout.training) == train_ranks
        assert layout.publish_members == (0, *layout.serving)
        assert [layout.roles(rank) for rank in range(world)] == [["train"]] * train_ranks + [["serve"]] * (world - train_ranks)
        assert layout.roles(world) == []


def test_an_unresolved_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.train_ranks=None"):
        JobLayout.of(recipe(), 4)
