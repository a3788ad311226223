"""Layouts: the table of each member says what FSDP2 over tensor and expert parallelism leaves it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_cases import layouts, local_tensors, model, models, numbered_tensors, some_experts

from pearl.engine.comm.layout import Layout, held
from pearl.engine.models.params import all_parts


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_the_table_of_a_member_is_what_it_holds(data: st.DataObject):
    config = data.draw(models())
    layout = data.draw(layouts(config))
    tensors = numbered_tensors(config)
    member = data.draw(st.sampled_from(layout.members))
    expected = local_tensors(config, layout, member, tensors)
    for spec in held(config, layout, member):
        value = torch.full(spec.shape, -1)
        for part in spec.parts:
            value[part.target_index] = tensors[part.hf_name][part.source_index()]
        assert torch.equal(value, expected[spec.name]), spec.name


def test_the_stacked_form_of_a_members_experts():
    """Four experts over two members, each of them cut in two rows by FSDP: the third member has number 1."""
    layout = Layout(members=(5, 6, 7, 8), fsdp=4, ep=2)
    (spec,) = [s for s in held(model(experts=some_experts(4)), layout, 7) if s.name == "layers.1.experts.down"]
    assert spec.stacked is not None and spec.shape == (1, 6, 3)
    assert [part.source[0] for part in all_parts(spec) if part.hf_name.endswith("experts.down_proj")] == [(1, 2)]
    assert [part.hf_name for part in spec.parts] == ["model.layers.1.mlp.experts.1.down_proj.weight"]


def test_uneven_rows_leave_the_last_members_with_fewer_or_none():
    layout = Layout(members=tuple(range(5)), fsdp=5)
    heights = [{s.name: s.shape[0] for s in held(model(hidden_size=6), layout, member)} for member in layout.members]
    assert [h["norm.weight"] for h in heights] == [2, 2, 2, 0, 0]
    assert [h["embed.weight"] for h in heights] == [4, 4, 4, 4, 3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"members": ()}, r"members=\(\): must be different integers"),
        ({"members": (1, 1)}, r"members=\(1, 1\): must be different integers"),
        ({"members": (0, -1)}, r"members=\(0, -1\): must be"),
        ({"members": (0, 1, 2), "fsdp": 2}, "3 of them, must be a multiple of fsdp=2 x tp=1"),
        ({"members": (0, 1), "tp": 0}, "tp=0: must be an integer >= 1"),
        ({"members": (0, 1, 2, 3), "tp": 2, "ep": 3}, "ep=3: must divide fsdp=1 x tp=2, or be a multiple"),
        ({"members": (0, 1, 2, 3), "tp": 2, "ep": 8}, "ep=8: must divide"),
    ],
)
def test_impossible_layouts_are_named(fields: dict, words: str):
    with pytest.raises(ValueError, match=words):
        Layout(**fields)


def test_strangers_and_too_few_experts_are_named():
    layout = Layout(members=(3, 4), tp=2)
    with pytest.raises(ValueError, match=r"member=0: must be one of \(3, 4\)"):
        held(model(), layout, 0)
