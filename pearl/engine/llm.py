"""LLM: offline generation. Give prompts, get completions in the same order; stepping is done inside.

Owns one Engine and the order of results; knows nothing of scheduling or tensors. Invariant: a call leaves no request behind,
also when it raises.

    llm = LLM(folder, dtype="float32")
    [completion] = llm.generate("once upon", SamplingParams(temperature=0))
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.config import EngineConfig
from pearl.engine.assembly import choose_parts
from pearl.engine.engine import Engine
from pearl.engine.leader import Leader
from pearl.engine.models.config import ModelConfig
from pearl.engine.ranks import Ranks
from pearl.engine.request import Completion
from pearl.protocol import SamplingParams

if TYPE_CHECKING:
    from pearl.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
CHECK_RANKS = "PEARL_CHECK_RANKS"
"""Environment variable: with 1 the ranks of an instance compare after every step what they drew."""


class LLM:
    """`LLM(folder, dtype="float32", ...)` or `LLM(EngineConfig(...))`; keywords are EngineConfig's fields.

    With `tensor_parallel=N` it starts N - 1 processes beside its own, which end with it: `close()` or `with LLM(...) as llm`.
    """

    def __init__(self, config_or_path: EngineConfig | ModelConfig | str | Path, **engine_config: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(engine_config) - known)
        if unknown:
            raise ValueError(f"unknown engine setting {unknown[0]!r}: must be one of {', '.join(sorted(known - {'model'}))}")
        if isinstance(config_or_path, EngineConfig):
            config = dataclasses.replace(config_or_path, **engine_config)
        else:
            config = EngineConfig(model=config_or_path, **engine_config)
        self._stop = lambda: None
        self.engine = Engine(config) if config.tensor_parallel == 1 else self._over_several_ranks(config)

    def _over_several_ranks(self, config: EngineConfig) -> Engine:
        """Starts the other ranks; whatever can be refused without them is refused first."""
        device = choose_parts(config).device
        ranks = Ranks(config)
        self._stop = weakref.finalize(self, ranks.kill)
        try:
            check = os.environ.get(CHECK_RANKS) == "1"
            return Leader(config, comm=ranks.connect(device), check_ranks=check, last_words=ranks.last_words)
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Ends the other ranks of a tensor-parallel instance; also done when the program ends. Nothing is served afterwards."""
        self.engine.close()
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """What the model folder recommends: `SamplingParams(**llm.generation_defaults)`. Never applied unasked."""
        return self.engine.generation_defaults

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes one prompt or many (text or ids); `params` is one for all or one each.

        Results are in the order of the prompts, the n siblings of a prompt side by side. ValueError before anything runs.
        """
        if self.engine.has_unfinished():
            raise RuntimeError("the engine holds requests that were added by hand: step it until they have ended")
        listed = _listed(prompts)
        each = _one_each(params, len(listed))
        queued: list[str] = []
        try:
            for prompt, one in zip(listed, each, strict=True):
                queued.append(self.engine.add_request(prompt, one, streaming=False))
            return self._run(queued)
        finally:
            for request_id in queued:  # those that a failure left; after a normal call there are none
                self.engine.discard(request_id)

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answers one conversation or many; a message is {"role": ..., "content": ...} as the model's template takes it.

        `tools`, `template` and `template_args` are for all of them, see `Tokenizer.render_chat`.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"messages={messages!r}: must be a list of at least one message, or a list of such lists")
        many: Any = [messages] if isinstance(messages[0], dict) else messages
        options: dict[str, Any] = {"tools": tools, "template": template, "template_args": template_args}
        return self.generate([self.tokenizer.render_chat(list(one), **options) for one in many], params)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each id after the first, given those before it: len(token_ids) - 1 numbers of the model's softmax.

        `token_ids` may be up to max_model_len - 1 long.
        """
        [completion] = self.generate([list(token_ids)], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True))
        if completion.error is not None:
            raise RuntimeError(f"score: {completion.error}")
        return [value for value in (completion.prompt_logprobs or [])[1:] if value is not None]

    def _run(self, queued: list[str]) -> list[Completion]:
        done: dict[str, list[Completion]] = {request_id: [] for request_id in queued}
        while self.engine.has_unfinished():
            if self.engine.paused or self.engine.asleep:
                raise RuntimeError("the engine is paused or asleep: resume or wake it before generating")
            for completion in self.engine.step():
                done[completion.request_id].append(completion)
            for transfer in self.engine.take_handoffs():
                self.engine.finish_export(transfer.transfer_id, ok=False)  # there is no other engine
        return [one for request_id in queued for one in sorted(done[request_id], key=lambda completion: completion.index)]


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single one (text, or a list of ids) is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: must be text, token ids or a list of these")
    listed: list[Any] = list(prompts)
    return [listed] if listed and not isinstance(listed[0], (str, Iterable)) else listed


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    if len(each) != count:
        raise ValueError(f"params: has {len(each)} entries for {count} prompts; must be one for all or one each")
    return each
