"""What a job is told: composed frozen dataclasses, and checks that run before any process starts.

A recipe (`pearl/rl/recipes/`) returns a Config, `overrides.py` applies `--set`, and `resolve` refuses what is impossible in
this world, with the nearest valid sizes. Nothing mutates a Config.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from pearl.emulation_options import EMULATED
from pearl.emulation_options import EmulationOptions as EmulationOptions
from pearl.field_checks import above_zero as above_zero
from pearl.field_checks import at_least as at_least
from pearl.field_checks import below
from pearl.field_checks import one_of as one_of
from pearl.protocol import Role, SamplingParams
from pearl.scheduler_options import BorrowSettings as BorrowSettings
from pearl.scheduler_options import ElasticOptions as ElasticOptions
from pearl.scheduler_options import ExpandSettings as ExpandSettings
from pearl.scheduler_options import PdSettings as PdSettings
from pearl.scheduler_options import SchedOptions as SchedOptions
from pearl.training_options import AlgorithmOptions as AlgorithmOptions
from pearl.training_options import OptimizerOptions as OptimizerOptions
from pearl.training_options import TrainerOptions as TrainerOptions
from pearl.training_options import WarmupOptions as WarmupOptions
from pearl.training_options import check_layers

DTYPES = ("float32", "bfloat16", "float16")

SEEDS = 2**64
"""Random generators take no larger ones."""

CHOSEN = "chosen"
"""The field of a Config that `resolve` writes and nobody sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One inference engine. Sizes: `block_size` in tokens, `max_batch_tokens` tokens per step, `max_num_seqs` requests.

    `model` is a Hugging Face folder or a ModelConfig, `seed` that of random weights and of requests without their own; a job
    sets both itself. `dtype` (float32, bfloat16 or float16) is that of weights and KV, `device` auto, cpu, cuda or cuda:N,
    `kernels` auto (what suits the device), cpu, triton, flashinfer or reference. `load_format="dummy"` gives random
    weights. `tensor_parallel`: ranks that the model is cut over; an engine in a job has 1.

    `num_blocks=None` sizes the KV pool from memory (`kv_memory_fraction` of what is free). `kv_fill` poisons the pool in tests
    (nan). `max_model_len`: tokens of prompt and answer together, None for as many as the model can take.
    `enable_prefix_cache`: KV is kept for later requests that begin with the same tokens. `eviction`: which cached blocks make
    room first: the ones used longest ago ("lru"), or those that sessions had lost before, so that others keep theirs ("keep").

    `role`: "mixed" engines do all; "prefill" ones compute prompts and hand requests over with their first token; "decode" ones
    generate, and catch up by at most `decode_prefill_tokens` tokens of prompts in a step. In a job it is what serving ranks
    begin as. `transfer_deadline_s`: seconds for which a request that moves to or from another engine is waited for.

    `cuda_graphs`: decode steps are captured once and replayed, on GPUs and by kernels where that works. `overlap`: the next
    step is decided and queued while the device runs the last one, so that tokens are told a step later. `deterministic`: the
    same bits from run to run, whatever else is in a batch and whenever it came; refused for kernels that cannot (all but those
    for CPUs). A job with it is synchronous.
    """

    model: Any = None
    dtype: str = "bfloat16"
    kernels: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_fraction: float = 0.85
    kv_fill: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    enable_prefix_cache: bool = True
    eviction: Literal["lru", "keep"] = "keep"
    device: str = "auto"
    role: Role = Role.MIXED
    decode_prefill_tokens: int = 256
    transfer_deadline_s: float = 30.0
    tensor_parallel: int = 1
    seed: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    overlap: bool = False
    load_format: Literal["auto", "dummy"] = "auto"

    def __post_init__(self) -> None:
        sizes = ("block_size", "max_num_seqs", "max_batch_tokens", "decode_prefill_tokens", "tensor_parallel")
        at_least(self, "engine", 1, *sizes, whole=True)
        one_of("engine.dtype", self.dtype, DTYPES)
        one_of("engine.kernels", self.kernels, ("auto", "cpu", "triton", "flashinfer", "reference"))
        one_of("engine.eviction", self.eviction, ("lru", "keep"))
        one_of("engine.load_format", self.load_format, ("auto", "dummy"))
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"engine.deterministic={self.deterministic!r}: must be true or false")
        for name, value, needed in (("overlap", self.overlap, False), ("tensor_parallel", self.tensor_parallel, 1)):
            if self.deterministic and value != needed:
                raise ValueError(f"engine.{name}={value}: must be {needed} with deterministic=True")
        if self.overlap and self.tensor_parallel > 1:
            raise ValueError(f"engine.overlap={self.overlap}: must be False with tensor_parallel={self.tensor_parallel}")
        if self.num_blocks is not None:
            at_least(self, "engine", 1, "num_blocks", whole=True)
        if self.max_model_len is not None:
            at_least(self, "engine", 2, "max_model_len", whole=True)
        if self.kv_fill is not None and not isinstance(self.kv_fill, int | float):
            raise ValueError(f"engine.kv_fill={self.kv_fill!r}: must be None or a number")
        if not isinstance(self.device, str):
            raise ValueError(f"engine.device={self.device!r}: must be auto or the name of a device")
        if not 0 < self.transfer_deadline_s < float("inf"):
            raise ValueError(f"engine.transfer_deadline_s={self.transfer_deadline_s}: must be a finite number > 0")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ValueError(f"engine.kv_memory_fraction={self.kv_memory_fraction}: must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Where the policy comes from: `path` (a Hugging Face folder), or random init of the given sizes when `path` is None.

    The random one is a small Qwen3 whose tokenizer knows the environment's words; its folder is written into the run. It has
    `num_layers` layers, `hidden_size` wide (`intermediate_size` inside their MLPs), `num_heads` query heads of `head_dim`
    numbers, which share `num_kv_heads` heads of keys and values, and takes up to `max_position` tokens.
    """

    path: str | None = None
    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position: int = 512

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
        at_least(self, "model", 1, *sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOptions:
    """Which environment plays (docs/environments.md). `name`: a built-in one, or MODULE:CLASS. `options`: the keyword
    arguments of its constructor, also one at a time as `env.options.NAME`. Episodes have at most `max_turns` turns, and are
    played in `workers` processes. An answer of the environment that takes longer than `timeout_s` seconds ends its process; an
    episode that failed is begun again up to `retries` times.
    """

    name: str = "frozen_lake"
    options: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 8
    workers: int = 1
    timeout_s: float = 30.0
    retries: int = 1

    def __post_init__(self) -> None:
        at_least(self, "env", 1, "max_turns", "workers")
        at_least(self, "env", 0, "retries")
        above_zero(self, "env", "timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How the policy plays. `max_tokens` is per turn; `request_timeout_s` bounds the silence on a request being served.

    Tokens are drawn at `temperature` (above 0) from the `top_k` likeliest (0: from all), and of these from the fewest whose
    probabilities reach `top_p` (1: from all).

    `redundancy`: so many more trajectories play in each group than are trained, and those that end last are given up: no batch
    waits for a straggler, at the price of what it has played, and of a batch that favours short episodes.

    `report_s`: a worker tells the sampled tokens of requests that have not ended this often (0: after every engine step; at
    most half of `request_timeout_s`, else it looks dead). What it has not told when it dies is sampled again.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    request_timeout_s: float = 120.0
    redundancy: int = 0
    report_s: float = 0.5

    def __post_init__(self) -> None:
        above_zero(self, "rollout", "request_timeout_s")
        at_least(self, "rollout", 0, "redundancy", whole=True)
        at_least(self, "rollout", 0, "report_s")
        try:
            SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens)
        except ValueError as error:
            raise ValueError(f"rollout.{error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Which ranks do what: the first `train_ranks` train, the others serve; a single rank does both by turns.

    None means 1 of up to 3 ranks and a quarter of more.
    """

    train_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.train_ranks is not None:
            at_least(self, "cluster", 1, "train_ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every wait of the job has one of these, in seconds, and its error names it.

    `join_s`: until all ranks have found each other; `start_s`: until all have loaded what they need; `silence_s`: a rank or
    controller that answers no heartbeat (one each `heartbeat_s`, which is less) for so long is killed, and the job ends;
    `command_s`: a training step, a publication, a checkpoint, any other command that ranks carry out together;
    `stop_s`: a rank that was told to end is gone after so long, whatever it is doing.
    """

    join_s: float = 25.0
    start_s: float = 600.0
    heartbeat_s: float = 2.0
    silence_s: float = 12.0
    command_s: float = 600.0
    stop_s: float = 6.0

    def __post_init__(self) -> None:
        above_zero(self, "timeouts", "join_s", "start_s", "heartbeat_s", "silence_s", "command_s", "stop_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole job: `max_steps` steps of `rollout_batch_size` trajectories, `group_size` siblings of one start state each.

    The run is a new folder in `output_dir`, whose name begins with `recipe`; `seed` is that of everything drawn.
    `max_staleness` counts weight versions between a trajectory's oldest token and the update that trains on it; 0 is
    synchronous, and None means 0 for one rank (which takes turns) and 1 for more. `device`: "emulated:PROFILE" runs the job
    without any device, at the pace of a cost profile and with tokens drawn at random (docs/elasticity.md).

    `save_steps` (a checkpoint to resume from, the last `keep_checkpoints` are kept) and `eval_steps` (`eval_episodes` greedy
    episodes on seeds that training never plays): every so many steps, 0 for never; the final policy is always saved. `trace`
    writes trace.json for ui.perfetto.dev, `tensorboard` event files into RUN/tensorboard; `wandb` is the project of Weights &
    Biases that gets the metrics; `check_weights` compares trainer and engines bit by bit after each publication, and ends the
    run if they differ.

    `chosen` is no setting: it names those that `resolve` filled in for one number of ranks; see `unresolved`.
    """

    recipe: str = ""
    seed: int = 0
    output_dir: str = "runs"
    rollout_batch_size: int = 128
    group_size: int = 8
    max_staleness: int | None = None
    max_steps: int = 100
    save_steps: int = 0
    keep_checkpoints: int = 2
    eval_steps: int = 0
    eval_episodes: int = 64
    trace: bool = False
    tensorboard: bool = False
    wandb: str = ""
    check_weights: bool = False
    device: str = "auto"
    model: ModelOptions = field(default_factory=ModelOptions)
    env: EnvOptions = field(default_factory=EnvOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    warmup: WarmupOptions = field(default_factory=WarmupOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    pd: PdSettings = field(default_factory=PdSettings)
    borrow: BorrowSettings = field(default_factory=BorrowSettings)
    expand: ExpandSettings = field(default_factory=ExpandSettings)
    sched: SchedOptions = field(default_factory=SchedOptions)
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    emulation: EmulationOptions = field(default_factory=EmulationOptions)
    chosen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, "", 1, "rollout_batch_size", "max_steps", "eval_episodes", "keep_checkpoints", whole=True)
        at_least(self, "", 2, "group_size", whole=True)
        if self.engine.tensor_parallel != 1:
            several = f"engine.tensor_parallel={self.engine.tensor_parallel}"
            raise ValueError(f"{several}: a job serves with engines of 1 rank in this release; LLM takes more")
        above_zero(self.rollout, "rollout", "temperature")
        if self.device != "auto" and not self.emulated:
            raise ValueError(f"device={self.device!r}: must be auto or emulated:PROFILE")
        if self.emulated is not None and self.check_weights:
            raise ValueError(f"check_weights={self.check_weights}: must be false with device={self.device!r}, there are none")
        at_least(self, "", 0, "seed", "save_steps", "eval_steps", whole=True)
        if self.seed >= SEEDS:
            raise ValueError(f"seed={self.seed}: must be below 2**64")
        if not isinstance(self.output_dir, str) or not self.output_dir.strip():
            raise ValueError(f"output_dir={self.output_dir!r}: must be the name of a folder, for example runs")
        if self.max_staleness is not None:
            at_least(self, "", 0, "max_staleness")

    @property
    def emulated(self) -> str | None:
        """The cost profile of a job without devices; None for one with them."""
        return self.device.removeprefix(EMULATED) if self.device.startswith(EMULATED) else None

    @property
    def report_s(self) -> float:
        """`rollout.report_s`, at the pace of the job: emulated devices may be slowed down."""
        return self.rollout.report_s * (self.emulation.slowdown if self.emulated is not None else 1.0)


def nearest_multiples(value: int, of: int) -> str:
    """'96 or 128': the multiples of `of` around `value`, for error messages."""
    below, above = value // of * of, -(-value // of) * of
    return f"{below} or {above}" if 0 < below != above else str(above)


def resolve(config: Config, world: int) -> Config:
    """Checks what depends on several fields and on the number of ranks; returns the Config the job runs with."""
    c = config
    train_ranks = max(1, world // 4) if c.cluster.train_ranks is None else c.cluster.train_ranks
    if train_ranks > max(1, world - 1):
        most = f"of {world} rank{'s' if world > 1 else ''} at most {max(1, world - 1)} can train"
        raise ValueError(f"cluster.train_ranks={train_ranks}: {most}, at least one must serve")
    if c.rollout_batch_size % c.group_size:
        sizes = f"rollout_batch_size={c.rollout_batch_size}: must be a multiple of group_size={c.group_size}"
        raise ValueError(f"{sizes}, e.g. {nearest_multiples(c.rollout_batch_size, c.group_size)}")
    if c.rollout_batch_size % c.optimizer.mini_batch_size:
        divisors = [n for n in range(1, c.rollout_batch_size + 1) if c.rollout_batch_size % n == 0]
        valid = f"must divide rollout_batch_size={c.rollout_batch_size}; valid: {', '.join(map(str, divisors))}"
        raise ValueError(f"optimizer.mini_batch_size={c.optimizer.mini_batch_size}: {valid}")
    for prefix, waits in (("timeouts", c.timeouts), ("elastic", c.elastic)):  # else everybody looks silent between two pings
        below(waits, prefix, "heartbeat_s", "silence_s")
    _check_reports(c)
    if c.model.path is None:
        _check_fresh_model(c)
    staleness = (0 if world == 1 or c.engine.deterministic else 1) if c.max_staleness is None else c.max_staleness
    if c.engine.deterministic and staleness:
        raise ValueError(f"max_staleness={staleness}: must be 0 with engine.deterministic=True")
    automatic = {"max_staleness": c.max_staleness, "cluster.train_ranks": c.cluster.train_ranks}
    chosen = tuple(name for name, value in automatic.items() if value is None or name in c.chosen)
    if c.emulated is not None:  # nothing is learned, so that nothing has to be warmed up
        c = replace(c, warmup=replace(c.warmup, steps=0))
    return replace(c, chosen=chosen, max_staleness=staleness, cluster=replace(c.cluster, train_ranks=train_ranks))


def _check_reports(c: Config) -> None:
    """No worker that serves must look like one that does not."""
    limit, said = c.rollout.request_timeout_s, c.rollout.report_s
    if c.report_s > limit / 2:
        slow = f", emulation.slowdown={c.report_s / said:g}" if c.report_s != said else ""
        most = f"must be at most {limit / 2 * said / c.report_s:g}, half of what a request may be silent"
        raise ValueError(f"rollout.report_s={said:g}: {most} (rollout.request_timeout_s={limit:g}{slow})")


def unresolved(config: Config) -> Config:
    """The Config as it was before `resolve`, so that it can be resolved for another number of ranks: what was set stays."""
    for name in config.chosen:
        if name == "max_staleness":
            config = replace(config, max_staleness=None)
        elif name == "cluster.train_ranks":
            config = replace(config, cluster=replace(config.cluster, train_ranks=None))
    return replace(config, chosen=())


def _check_fresh_model(c: Config) -> None:
    """The sizes of a policy that begins from random weights must fit each other and the engine."""
    m = c.model
    if m.num_heads % m.num_kv_heads:
        valid = [n for n in range(1, m.num_heads + 1) if m.num_heads % n == 0]
        sizes = f"model.num_kv_heads={m.num_kv_heads}: must divide model.num_heads={m.num_heads}"
        raise ValueError(f"{sizes}; valid: {', '.join(map(str, valid))}")
    if m.head_dim % 2:
        raise ValueError(f"model.head_dim={m.head_dim}: must be even (rotary embedding pairs), e.g. {m.head_dim + 1}")
    check_lengths(c, m.max_position, "model.max_position")
    check_layers(c.trainer, m.num_layers, "model.num_layers")


def check_lengths(config: Config, max_position: int, source: str) -> None:
    """ValueError if the engine is to take more tokens than the model (`source` says its limit), or a turn leaves no prompt."""
    length = config.engine.max_model_len
    if length is not None and length > max_position:
        raise ValueError(f"engine.max_model_len={length}: must be at most {source}={max_position}")
    limit, name = (max_position, source) if length is None else (length, "engine.max_model_len")
    if config.rollout.max_tokens >= limit:
        most = f"must be below {name}={limit}, which prompt and answers share"
        raise ValueError(f"rollout.max_tokens={config.rollout.max_tokens}: {most}")


def to_json(config: Config) -> str:
    """The whole configuration as JSON, as written to a run's `config.json`."""
    return msgspec.json.format(msgspec.json.encode(config)).decode()


def from_json(text: str | bytes) -> Config:
    """Reads what `to_json` wrote."""
    return msgspec.json.decode(text, type=Config)
