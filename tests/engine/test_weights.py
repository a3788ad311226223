"""The versioned weight store: any grouping gives the same weights, and everything it must refuse changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import hf_models
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from weight_cases import (
    EMBEDDING,
    HEAD,
    Q,
    config_of,
    is_model,
    new_decoder,
    snapshot,
    tensors_of,
    unchanged,
)

from pearl.engine.models.decoder import Decoder
from pearl.engine.weights.store import WeightStore


def _one_per_call(pairs: list) -> list[list]:
    return [[pair] for pair in pairs]


GROUPINGS: dict[str, Callable[[list], list[list]]] = {
    "all at once": lambda pairs: [pairs],
    "one per call": _one_per_call,
    "reversed": lambda pairs: _one_per_call(pairs[::-1]),
    "three buckets": lambda pairs: [pairs[0::3], pairs[1::3], pairs[2::3]],
    "shuffled": lambda pairs: _one_per_call(random.Random(0).sample(pairs, len(pairs))),
}


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("build", [hf_models.dense, hf_models.llama])
def test_any_order_and_any_grouping_gives_the_same_weights(grouping: str, build: Callable[..., PreTrainedModel]) -> None:
    overrides = {} if build is hf_models.dense else {"attention_bias": True, "mlp_bias": True}
    old, new = hf_models.randomise(build(**overrides)), hf_models.randomise(build(seed=1, **overrides), seed=1)
    decoder, store = new_decoder(config_of(old))
    assert (store.version, store.ready) == (-1, False)
    store.stage(tensors_of(old), 0)
    store.commit()
    assert (store.version, store.ready) == (0, True)
    before, addresses = snapshot(decoder), {name: value.data_ptr() for name, value in decoder.named_parameters()}
    for bucket in GROUPINGS[grouping](tensors_of(new)):
        store.stage(bucket, 5)
        assert unchanged(decoder, before)
    assert is_model(decoder, old)
    assert store.staged_version == 5
    store.commit()
    assert (store.version, store.staged_version) == (5, None)
    assert is_model(decoder, new)
    assert not is_model(decoder, old)
    assert addresses == {name: value.data_ptr() for name, value in decoder.named_parameters()}


def _without(name: str) -> Callable[[list], list]:
    return lambda pairs: [pair for pair in pairs if pair[0] != name]


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[list], list]:
    return lambda pairs: [(n, change(t) if n == name else t) for n, t in pairs]


def _spoiled(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[7] = value
        return tensor

    return change


BAD_UPDATES: dict[str, tuple[Callable[[list], list], str]] = {
    "missing": (_without(Q), f"1 of 25 tensors are missing: {Q}"),
    "unknown": (lambda pairs: [*pairs, ("model.layers.2.x.weight", pairs[0][1])], "model.layers.2.x.weight: .* no such tensor"),
    "doubled": (lambda pairs: [*pairs, pairs[3]], "arrived twice for version 1"),
    "shape": (_with(Q, lambda t: t[:-1]), r"q_proj.weight: shape \(63, 32\), must be \(64, 32\)"),
    "transposed": (_with(Q, lambda t: t.T), r"q_proj.weight: shape \(32, 64\)"),
    "int": (_with(Q, lambda t: t.to(torch.int8)), "q_proj.weight: dtype torch.int8, must be one of torch.float64"),
    "float8": (_with(Q, lambda t: t.to(torch.float8_e4m3fn)), "q_proj.weight: dtype torch.float8_e4m3fn"),
    "nan": (_with(HEAD, _spoiled(float("nan"))), "lm_head.weight: 1 of 4096 values are not finite"),
    "inf": (_with("model.norm.weight", _spoiled(float("-inf"))), "model.norm.weight: 1 of 32 values are not finite"),
    "overflow": (_with(Q, lambda t: t.double() * 1e300), "q_proj.weight: .* not finite in torch.float32"),
}


@pytest.mark.parametrize("kind", BAD_UPDATES)
@pytest.mark.parametrize("bucket", [1, 4, 1000])
def test_a_bad_update_changes_nothing(kind: str, bucket: int) -> None:
    old, new = hf_models.dense(), hf_models.dense(seed=1)
    decoder, store = new_decoder(config_of(old))
    store.stage(tensors_of(old), 0)
    store.commit()
    before = snapshot(decoder)
    change, message = BAD_UPDATES[kind]
    pairs = change(tensors_of(new))
    with pytest.raises(ValueError, match=message):
        for start in range(0, len(pairs), bucket):
            store.stage(pairs[start : start + bucket], 1)
        store.commit()
    assert unchanged(decoder, before)
    assert store.version == 0
    store.discard()
    with pytest.raises(ValueError, match="nothing is staged"):
        store.commit()
    store.stage(tensors_of(new), 1)  # and nothing of the bad one is left
    store.commit()
    assert is_model(decoder, new)


def test_a_source_that_breaks_off_leaves_nothing_staged() -> None:
    model = hf_models.dense()
    decoder, store = new_decoder(config_of(model))

    def broken():
        yield from tensors_of(model)[:5]
        raise ConnectionError("peer went away")

    with pytest.raises(ConnectionError):
        store.stage(broken(), 0)
    assert store.staged_version is None
    assert not store.ready
    store.stage(tensors_of(model), 0)
    store.commit()
    assert is_model(decoder, model)


def test_versions_only_grow_and_do_not_mix() -> None:
    pairs = tensors_of(hf_models.dense())
    _, store = new_decoder(config_of(hf_models.dense()))
    with pytest.raises(ValueError, match="version=-1: must be greater than the present version -1"):
        store.stage(pairs, -1)
    store.stage(pairs, 3)
    with pytest.raises(ValueError, match="version=4: version 3 is being staged"):
        store.stage(pairs, 4)
    store.commit()
    for version in (3, 2):
        with pytest.raises(ValueError, match=f"version={version}: must be greater than the present version 3"):
            store.stage(pairs, version)


def test_other_float_dtypes_are_converted() -> None:
    model = hf_models.dense().bfloat16()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        decoder, store = new_decoder(config_of(model), torch.bfloat16)
        store.stage([(name, value.to(dtype)) for name, value in tensors_of(model)], 0)
        store.commit()
        assert torch.equal(decoder.get_parameter("lm_head.weight"), model.lm_head.weight)
        assert decoder.get_parameter("lm_head.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("position", [0, 1000])
def test_a_tied_head_is_accepted_only_if_it_is_the_embedding(position: int) -> None:
    model = hf_models.dense(tie_word_embeddings=True)
    decoder, store = new_decoder(config_of(model))
    pairs = tensors_of(model)
    assert HEAD not in dict(pairs)
    equal, other = dict(pairs)[EMBEDDING].clone(), dict(pairs)[EMBEDDING] + 1e-3
    pairs.insert(position, (HEAD, equal))
    store.stage(pairs, 0)
    store.commit()
    assert is_model(decoder, model)
    store.stage([(name, other if name == HEAD else value) for name, value in pairs], 1)
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        store.commit()
    assert (store.version, store.staged_version) == (0, None)


def test_the_store_checks_the_parameters_it_is_given() -> None:
    config = config_of(hf_models.dense())
    decoder, _ = new_decoder(config)
    params = dict(decoder.named_parameters())
    del params["layers.1.o.weight"]
    with pytest.raises(ValueError, match=r"params: missing or mis-shaped: layers.1.o.weight"):
        WeightStore(config, params)


# ---------------------------------------------------------------------------------------------------- in place


def loaded(model: PreTrainedModel) -> tuple[Decoder, WeightStore]:
    decoder, store = new_decoder(config_of(model))
    store.stage(tensors_of(model), 0)
    store.commit()
    return decoder, store


@pytest.mark.parametrize("grouping", ["in order", "reversed", "shuffled", "by rows", "an iterator"])
@pytest.mark.parametrize("build", [hf_models.dense, hf_models.llama, hf_models.moe])
def test_a_stream_in_any_order_gives_the_weights(grouping: str, build: Callable[..., PreTrainedModel]) -> None:
    old, new = build(), hf_models.randomise(build(seed=1), seed=1)
    decoder, store = loaded(old)
    addresses = {name: value.data_ptr() for name, value in decoder.named_parameters()}
    pairs = tensors_of(new)
    store.stream(
        {
            "in order": lambda: pairs,
            "reversed": lambda: pairs[::-1],
            "shuffled": lambda: random.Random(0).sample(pairs, len(pairs)),
            "by rows": lambda: [(name, rows, start) for name, value in pairs for start, rows in by_rows(value)],
            "an iterator": lambda: iter(pairs),
        }[grouping](),
        7,
    )
    assert (store.version, store.ready, store.staged_version) == (7, True, None)
    assert is_model(decoder, new) and not is_model(decoder, old)
    assert addresses == {name: value.data_ptr() for name, value in decoder.named_parameters()}


def by_rows(value: Tensor) -> list[tuple[int, Tensor]]:
    return [(start, value[start : start + 5]) for start in range(0, len(value), 5)]


@pytest.mark.parametrize("kind", BAD_UPDATES)
@pytest.mark.parametrize("sequence", [True, False])
def test_a_bad_stream_leaves_the_old_version_or_none(kind: str, sequence: bool) -> None:
    """What can be seen beforehand changes nothing; what comes up later leaves a store that serves nothing."""
    old, new = hf_models.dense(), hf_models.dense(seed=1)
    decoder, store = loaded(old)
    before = snapshot(decoder)
    change, message = BAD_UPDATES[kind]
    pairs = change(tensors_of(new))
    with pytest.raises(ValueError, match=message):
        store.stream(pairs if sequence else iter(pairs), 1)
    assert store.staged_version is None
    of_values = kind in ("nan", "inf", "overflow")
    if sequence and not of_values:
        assert unchanged(decoder, before) and (store.version, store.ready) == (0, True)
    else:
        assert (store.version, store.ready) == (-1, False)
    assert all(bool(torch.isfinite(value).all()) for value in decoder.parameters())
    store.stream(tensors_of(new), 1)
    assert store.version == 1 and is_model(decoder, new)


@pytest.mark.parametrize("way", ["staged", "streamed"])
def test_after_a_broken_stream_a_whole_version_makes_the_store_ready(way: str) -> None:
    old, new = hf_models.dense(), hf_models.dense(seed=1)
    decoder, store = loaded(old)

    def broken():
        yield from tensors_of(new)[:5]
        raise ConnectionError("peer went away")

    with pytest.raises(ConnectionError):
        store.stream(broken(), 4)
    assert (store.version, store.ready) == (-1, False)
    assert not is_model(decoder, old)
    if way == "staged":
        store.stage(tensors_of(new)[:3], 4)
        assert not store.ready
        with pytest.raises(ValueError, match="22 of 25 tensors are missing"):
            store.commit()
        store.stage(tensors_of(new)[3:], 4)
        store.commit()
    else:
        with pytest.raises(ValueError, match="22 of 25 tensors are missing"):
            store.stream(iter(tensors_of(new)[:3]), 4)
        store.stream(iter(tensors_of(new)), 4)
    assert store.version == 4 and is_model(decoder, new)


def test_all_that_is_wrong_with_a_sequence_is_said_at_once() -> None:
    model = hf_models.dense()
    _, store = loaded(model)
    pairs = _with(EMBEDDING, lambda t: t.T)(_with(HEAD, lambda t: t.int())(_without(Q)(tensors_of(model))))
    words = [f"{EMBEDDING}: shape", f"{HEAD}: dtype torch.int32", "x.y: the model has no such tensor"]
    for way in (store.stage, store.stream):
        with pytest.raises(ValueError) as error:
            way([*pairs, ("x.y", pairs[0][1])], 1)
        assert [word in str(error.value) for word in words] == [True] * 3
    assert f"3 of 25 tensors are missing: {EMBEDDING}; " in str(error.value)
    assert store.version == 0


def test_a_stream_and_a_staged_version_do_not_mix() -> None:
    model = hf_models.dense()
    _, store = loaded(model)
    store.stage(tensors_of(model)[:4], 2)
    for version in (2, 3):
        with pytest.raises(ValueError, match=f"version={version}: version 2 is being staged; commit or discard it first"):
            store.stream(tensors_of(model), version)
    assert (store.version, store.staged_version) == (0, 2)
    with pytest.raises(ValueError, match="version=0: must be greater than the present version 0"):
        store.stream(tensors_of(model), 0)


@pytest.mark.parametrize("position", [0, 1000])
def test_a_stream_takes_a_tied_head_only_if_it_is_the_embedding(position: int) -> None:
    model = hf_models.dense(tie_word_embeddings=True)
    decoder, store = loaded(model)
    pairs = tensors_of(model)
    pairs.insert(position, (HEAD, dict(pairs)[EMBEDDING].clone()))
    store.stream(pairs, 1)
    assert store.version == 1 and is_model(decoder, model)
    other = [(name, value + 1e-3 if name == HEAD else value) for name, value in pairs]
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        store.stream(other, 2)
    assert store.version == -1


def test_a_dropped_version_is_forgotten() -> None:
    model, new = hf_models.dense(), hf_models.dense(seed=1)
    decoder, store = loaded(model)
    store.stage(tensors_of(model)[:4], 2)
    store.drop()
    assert (store.version, store.ready, store.staged_version) == (-1, False, None)
    store.stage(tensors_of(new), 0)
    store.commit()
    assert store.version == 0 and is_model(decoder, new)


def test_what_the_owner_wrote_can_be_declared_a_version() -> None:
    decoder, store = new_decoder(config_of(hf_models.dense()))
    decoder.init_weights(3)
    before = snapshot(decoder)
    store.declare(0)
    assert store.version == 0 and unchanged(decoder, before)
    with pytest.raises(ValueError, match="version=0: must be greater"):
        store.declare(0)


def test_the_first_version_is_staged_where_it_will_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is served before it, so no second copy is made; a later one is, once, and kept."""
    made: list[int] = []
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda tensor: made.append(tensor.nbytes) or real(tensor))
    model = hf_models.dense()
    decoder, store = loaded(model)
    assert made == []
    for version in (1, 2):
        store.stage(tensors_of(model), version)
        store.commit()
    assert sum(made) == sum(value.nbytes for value in decoder.parameters())
    made.clear()
    store.stream(tensors_of(model), 3)
    assert made == []
