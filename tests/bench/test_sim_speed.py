"""The job whose simulation is timed: its hardware by size, and that it runs."""

from __future__ import annotations

import pytest

from bench.sim_speed import simulation_of


@pytest.mark.parametrize(("gpus", "training", "reserved"), [(32, 16, 2), (64, 32, 8), (16, 8, 2)])
def test_half_of_the_gpus_train_and_a_quarter_serves(gpus: int, training: int, reserved: int) -> None:
    settings = simulation_of(gpus, 60.0, 512).settings
    assert (settings.hardware.training_gpus, settings.hardware.reserved_workers) == (training, reserved)
    assert settings.batch == 2 * gpus and settings.until_s == 3600.0 and settings.engine.block_size == 512


def test_it_plays_until_its_time_is_over() -> None:
    result = simulation_of(8, 1.0, 1024).run()
    assert 55.0 < result.seconds <= 60.0 and result.counts["generated"] > 0
