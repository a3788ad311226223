"""Overrides, checks and the round trip of a Config."""

import dataclasses

import pytest

from pearl.config import Config, EngineConfig, from_json, resolve, to_json, unresolved
from pearl.overrides import keys_of, override
from pearl.protocol import Role
from pearl.rl.recipes import registry


def test_override_reads_values_as_the_fields_type():
    config = override(
        Config(),
        ["seed=3", "optimizer.lr=1e-4", "engine.num_blocks=9", "engine.role=decode", "algorithm.normalize_std=false",
         "env.options.size=8", "env.options.note=plain text", "model.path=/some/where"],
    )  # fmt: skip
    assert (config.seed, config.optimizer.lr, config.engine.num_blocks, config.engine.role) == (3, 1e-4, 9, Role.DECODE)
    assert config.algorithm.normalize_std is False
    assert config.env.options == {"size": 8, "note": "plain text"}
    assert override(config, ["engine.num_blocks=none", "model.path=none"]).engine.num_blocks is None


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.aggregation=fixed", "algorithm.loss_divisor=64", "algorithm.normalize_std=false"],
        ["algorithm.importance_rule=mask", "algorithm.importance_cap=2"],
        ["env.timeout_s=5", "env.options.size=6", "env.options.p=0.5", "env.workers=2"],
    ],
)
def test_what_only_fits_together_may_come_in_any_order(settings):
    forth, back = (override(Config(), order) for order in (settings, settings[::-1]))
    assert forth == back != Config()


def test_of_what_is_set_twice_the_last_counts():
    settings = ["env.options.size=6", 'env.options={"p": 0.5}', "env.options.size=7", "seed=1", "seed=2"]
    both = override(Config(), settings)
    assert both.env.options == {"p": 0.5, "size": 7} and both.seed == 2
    with pytest.raises(ValueError, match="algorithm.loss_divisor=None: must be a number of tokens with aggregation=fixed"):
        override(Config(), ["algorithm.aggregation=fixed"])


def test_override_leaves_the_original_alone():
    before = Config()
    override(before, ["optimizer.lr=5"])
    assert before == Config()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nosuch.key=1", ["nosuch.key"]),
        ("lr=1", ["optimizer.lr", "warmup.lr"]),
        ("optimizer.learning_rate=1", ["optimizer.learning_rate", "did you mean"]),
        ("seed.x=1", ["seed.x"]),
        ("optimizer=1", ["section", "optimizer.lr"]),
        ("seed=abc", ["seed", "'abc'", "an integer"]),
        ("seed", ["KEY=VALUE", "--set seed=0"]),
        ("env.options", ["KEY=VALUE", "--set env.options={}"]),
        ("quickstart", ["KEY=VALUE", "--set seed=1"]),
        ("=3", ["KEY=VALUE"]),
        ("optimizer.lr=fast", ["optimizer.lr", "'fast'", "a number"]),
        ("env.options=4", ["env.options", "JSON object", '{"size": 4}']),
        ("env.options={size: 4}", ["env.options", "JSON object", '{"size": 4}']),
        ("seed=", ["seed=", "missing", "an integer"]),
        ("output_dir=", ["output_dir=", "missing"]),
        ("output_dir= ", ["output_dir=' '", "folder"]),
        ("model.path=", ["model.path=", "missing", "or none"]),
        ("chosen=x", ["chosen", "no such key"]),
        ("engine.role=boss", ["engine.role", "boss", "mixed, prefill, decode"]),
        ("algorithm.normalize_std=maybe", ["true or false"]),
        ("engine.kernels=fast", ["engine.kernels", "reference"]),
        ("engine.eviction=fifo", ["engine.eviction", "fifo", "lru", "keep"]),
        ("optimizer.lr=nan", ["optimizer.lr", "nan"]),
        ("optimizer.beta1=1", ["optimizer.beta1=1.0", "[0, 1)"]),
        ("optimizer.beta2=nan", ["optimizer.beta2=nan", "[0, 1)"]),
        ("seed=18446744073709551616", ["seed=18446744073709551616", "below 2**64"]),
        ("group_size=1", ["group_size=1", ">= 2"]),
        ("rollout.top_p=1.5", ["rollout.top_p", "1.5"]),
        ("algorithm.clip_low=2", ["algorithm.clip_low=2.0", "[0, 1]"]),
        ("engine.tensor_parallel=2", ["engine.tensor_parallel=2"]),
        ("algorithm.entropy_coef=nan", ["algorithm.entropy_coef", "nan"]),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting, words):
    with pytest.raises(ValueError) as error:
        override(Config(), [setting])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout_batch_size=100"], ["rollout_batch_size=100", "group_size=8", "96 or 104"]),
        (["optimizer.mini_batch_size=48"], ["optimizer.mini_batch_size=48", "1, 2, 4, 8, 16, 32, 64, 128"]),
        (["model.num_kv_heads=3"], ["model.num_kv_heads=3", "model.num_heads=4", "1, 2, 4"]),
        (["model.head_dim=7"], ["model.head_dim=7", "even", "8"]),
        (["model.max_position=100", "engine.max_model_len=101"], ["engine.max_model_len=101", "model.max_position=100"]),
        (["rollout.report_s=60.5"], ["rollout.report_s=60.5", "at most 60", "rollout.request_timeout_s=120"]),
        (
            ["rollout.report_s=1", "emulation.slowdown=100", "device=emulated:qwen3-8b-h800"],
            ["rollout.report_s=1", "at most 0.6", "rollout.request_timeout_s=120", "emulation.slowdown=100"],
        ),
        (["timeouts.heartbeat_s=12"], ["timeouts.heartbeat_s=12: must be below timeouts.silence_s=12"]),
        (["timeouts.silence_s=1.5"], ["timeouts.heartbeat_s=2: must be below timeouts.silence_s=1.5"]),
        (["elastic.heartbeat_s=7"], ["elastic.heartbeat_s=7: must be below elastic.silence_s=5"]),
        (["elastic.silence_s=1"], ["elastic.heartbeat_s=1: must be below elastic.silence_s=1"]),
        (["rollout.max_tokens=512"], ["rollout.max_tokens=512", "model.max_position=512"]),
        (["rollout.max_tokens=64", "engine.max_model_len=64"], ["rollout.max_tokens=64", "engine.max_model_len=64"]),
    ],
)
def test_impossible_sizes_name_the_valid_ones(settings, words):
    with pytest.raises(ValueError) as error:
        resolve(override(Config(), settings), world=1)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("world", "train_ranks", "staleness"), [(1, 1, 0), (2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 2, 1)])
def test_ranks_are_split_and_staleness_follows(world, train_ranks, staleness):
    config = resolve(Config(), world)
    assert (config.cluster.train_ranks, config.max_staleness) == (train_ranks, staleness)
    assert resolve(override(Config(), ["max_staleness=3"]), world).max_staleness == 3


def test_what_fits_exactly_is_taken():
    lengths = ["model.max_position=100", "engine.max_model_len=100", "rollout.max_tokens=99"]
    heads = ["model.num_heads=6", "model.num_kv_heads=3"]
    assert resolve(override(Config(), lengths + heads), world=1).rollout.max_tokens == 99


def test_what_was_chosen_for_one_number_of_ranks_is_chosen_again_for_another_and_what_was_set_stays():
    first = from_json(to_json(resolve(Config(), world=1)))
    assert first.chosen == ("max_staleness", "cluster.train_ranks")
    again = resolve(unresolved(first), world=8)
    assert (again.max_staleness, again.cluster.train_ranks) == (1, 2)
    fixed = from_json(to_json(resolve(override(Config(), ["max_staleness=3", "cluster.train_ranks=1"]), world=2)))
    again = resolve(unresolved(fixed), world=8)
    assert (again.max_staleness, again.cluster.train_ranks, again.chosen) == (3, 1, ())
    half = resolve(override(Config(), ["max_staleness=0"]), world=2)
    assert half.chosen == ("cluster.train_ranks",)
    assert unresolved(half).max_staleness == 0


@pytest.mark.parametrize(("world", "train_ranks"), [(1, 2), (2, 2), (4, 4), (4, 9)])
def test_a_split_without_a_serving_rank_is_refused_with_the_limit(world, train_ranks):
    with pytest.raises(ValueError, match=rf"cluster.train_ranks={train_ranks}.*at most {max(1, world - 1)}"):
        resolve(override(Config(), [f"cluster.train_ranks={train_ranks}"]), world)


@pytest.mark.parametrize("name", registry.RECIPES)
def test_every_recipe_resolves_and_survives_json(name):
    config = resolve(registry.load(name), world=1)
    assert from_json(to_json(config)) == config
    assert resolve(config, world=1) == config
    assert config.recipe == name


def test_an_unknown_recipe_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"^recipe 'quikstart': did you mean quickstart\?$"):
        registry.load("quikstart")
    names = "quickstart, frozenlake_random, sokoban, smollm2_hilo, qwen3_8b_swe, qwen3_30b_a3b_swe"
    with pytest.raises(ValueError, match=f"^recipe 'x': must be one of {names}$"):
        registry.load("x")


def test_every_section_is_frozen():
    for key in keys_of(Config()):
        section, *rest = key.split(".")
        value = getattr(Config(), section)
        target, name = (value, rest[0]) if rest else (Config(), section)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 0)


@pytest.mark.parametrize(
    "kwargs",
    [{"block_size": 0}, {"dtype": "int8"}, {"kv_memory_fraction": 0.0}, {"tensor_parallel": 0},
     {"block_size": 4.0}, {"block_size": True}, {"num_blocks": "9"}, {"max_num_seqs": 2.5}, {"kv_fill": "x"}, {"device": None}],
)
def test_engine_config_is_checked(kwargs):
    with pytest.raises(ValueError, match=f"engine.{next(iter(kwargs))}"):
        EngineConfig(**kwargs)
