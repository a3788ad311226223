"""Sampling parameters are checked wherever they come from; every message survives the wire."""

import math

import msgspec
import pytest

from pearl import protocol
from pearl.protocol import NewRequest, SamplingParams, Submit, ToController, ToRank, packed, unpacked


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [math.nan, math.inf, -1.0, "x", True]),
        ("top_p", [0.0, 1.1, math.nan, -0.5]),
        ("min_p", [-0.1, 1.5, math.nan]),
        ("top_k", [-5, 1.5, "x", 10**400]),
        ("repetition_penalty", [0.0, -1.0, math.inf]),
        ("presence_penalty", [math.nan]),
        ("frequency_penalty", [math.inf]),
        ("max_tokens", [0, -2, 1.5]),
        ("min_tokens", [-1]),
        ("n", [0, -1]),
        ("seed", [-1, 2**64, 0.5, -(10**400)]),
        ("logprobs", [-1]),
        ("logprobs_mode", ["other"]),
        ("stop", ["text", [""], [3], None, (text for text in ["a"])]),
        ("stop_token_ids", [[-1], ["x"], 18, None, (token for token in [18])]),
        ("ignore_eos", ["no", 1]),
        ("prompt_logprobs", [3, None]),
    ],
)
def test_a_bad_sampling_parameter_names_field_and_value(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens_is_refused_with_both():
    with pytest.raises(ValueError, match=r"min_tokens=5.*max_tokens=3"):
        SamplingParams(min_tokens=5, max_tokens=3)


def test_unknown_parameters_are_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"'temprature'.*temperature"):
        SamplingParams.from_dict({"temprature": 1.0})


def test_prompts_travel_as_they_are_and_broken_ones_are_refused():
    ids = [0, 1, 255, 256, 151_642, 2**31 - 1]
    request = NewRequest(request_id="a", prompt=packed(ids), params=SamplingParams())
    [other] = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(requests=[request])), type=ToRank).requests
    assert (other.prompt_token_ids, other.prompt_len) == (ids, len(ids))
    assert unpacked(packed([])) == []
    with pytest.raises(OverflowError):
        packed([2**31])
    with pytest.raises(ValueError, match="multiple of item size"):
        unpacked(b"12345")


def test_a_bad_value_is_refused_on_the_wire_too():
    request = NewRequest(request_id="a", prompt=packed([1]), params=SamplingParams())
    good = msgspec.to_builtins(Submit(requests=[request]), builtin_types=(bytes,))
    good["requests"][0]["params"]["top_p"] = 7.0
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=ToRank)


def _example(kind: type) -> object:
    """An instance with a plausible value in every field that has no default."""
    plain = {int: 3, str: "s", bytes: b"four", float: 0.5, bool: True}
    values = {}
    for field in msgspec.structs.fields(kind):
        if not field.required:
            continue
        info = msgspec.inspect.type_info(field.type)
        if field.type in plain:
            values[field.name] = plain[field.type]
        elif isinstance(info, msgspec.inspect.ListType):
            values[field.name] = []
        elif isinstance(info, msgspec.inspect.DictType):
            values[field.name] = {}
        elif isinstance(info, msgspec.inspect.LiteralType):
            values[field.name] = info.values[0]
        elif isinstance(info, msgspec.inspect.EnumType):
            values[field.name] = next(iter(field.type))
        elif isinstance(info, msgspec.inspect.UnionType):
            values[field.name] = None
        else:
            values[field.name] = _example(field.type)
    return kind(**values)


@pytest.mark.parametrize("union", [ToRank, ToController], ids=["to rank", "to controller"])
def test_every_message_survives_the_wire(union):
    for kind in union.__args__:
        message = _example(kind)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=union) == message


def test_commands_are_told_apart_by_tag():
    tags = [kind.__struct_config__.tag for kind in (*ToRank.__args__, *ToController.__args__)]
    assert len(set(tags)) == len(tags)
    assert issubclass(protocol.Stop, protocol.Command)
