"""Lines of trajectories.jsonl: first prompts as text, log-probs of what was sampled, versions."""

from __future__ import annotations

from collections.abc import Sequence

from pearl.rl.step_metrics import PROMPTS_KEPT, EpisodeRows
from pearl.rl.types import Trajectory


def trajectory(group: int, prompt: list[int], sampled: int = 2) -> Trajectory:
    count = len(prompt)
    return Trajectory(
        trajectory_id=f"{group}-0",
        group_id=group,
        env_seed=0,
        token_ids=[*prompt, *range(sampled), 9],
        loss_mask=[0] * count + [1] * sampled + [0],
        logprobs=[0.0] * count + [-1.23456] * sampled + [0.0],
        weight_versions=[-1] * count + [*range(3, 3 + sampled), -1],
    )


def test_the_text_of_a_prompt_is_made_once_for_siblings_and_never_another_ones() -> None:
    asked: list[Sequence[int]] = []

    def decode(ids: Sequence[int]) -> str:
        asked.append(list(ids))
        return " ".join(map(str, ids))

    rows = EpisodeRows(decode)
    assert [rows.row(trajectory(4, [5, 6]))["prompt"] for _ in range(3)] == ["5 6"] * 3
    assert len(asked) == 1
    assert rows.row(trajectory(4, [5, 7]))["prompt"] == "5 7", "the same group, begun otherwise"
    assert rows.row(trajectory(4, []))["prompt"] == ""
    for group in range(5, 5 + PROMPTS_KEPT):
        assert rows.row(trajectory(group, [group]))["prompt"] == str(group)
    assert rows.row(trajectory(4, [5, 6]))["prompt"] == "5 6"


def test_a_row_has_log_probs_of_sampled_tokens_and_the_span_of_versions() -> None:
    row = EpisodeRows(str).row(trajectory(1, [7, 8]))
    assert (row["logprobs"], row["weight_versions"]) == ([-1.2346, -1.2346], [3, 4])
    row = EpisodeRows(str).row(trajectory(1, [7, 8], sampled=0))
    assert (row["logprobs"], row["weight_versions"], row["prompt"]) == ([], [-1, -1], "[7, 8, 9]")
