"""Where chat templates come from, tools, arguments, and what a broken template or tokenizer folder is told as."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import tiny_tokenizers as tiny
from transformers import PreTrainedTokenizerFast

from pearl.engine.llm import LLM
from pearl.engine.tokenizer import Tokenizer
from pearl.protocol import SamplingParams

END = 263
ASK = [{"role": "user", "content": "ab"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"x": "é"}}}


def look(at: str) -> str:
    """Looks <|im_end|>.

    Args:
        at: where </s>
    """
    return at


def named(*names: str) -> list[dict]:
    return [{"name": name, "template": name + ": " + tiny.CHATML} for name in names]


def in_settings(folder: Path) -> None:
    tiny.save(tiny.byte_level(), folder, tiny.CHATML)


def in_a_file(folder: Path) -> None:
    tiny.save(tiny.byte_level(), folder)
    (folder / "chat_template.jinja").write_text(tiny.CHATML)


def in_both(folder: Path) -> None:
    """The file wins, as in transformers."""
    tiny.save(tiny.byte_level(), folder, "from the settings")
    (folder / "chat_template.jinja").write_text(tiny.CHATML)


def by_name(folder: Path) -> None:
    tiny.save(tiny.byte_level(), folder, None, chat_template=named("default", "tool_use", "rag"))


def in_a_folder(folder: Path) -> None:
    in_a_file(folder)
    (folder / "additional_chat_templates").mkdir()
    for one in named("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{one['name']}.jinja").write_text(one["template"])


@pytest.mark.parametrize("place", [in_settings, in_a_file, in_both, by_name, in_a_folder])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_are_found_and_chosen_as_in_transformers(
    tmp_path: Path, place: Callable[[Path], None], tools: Any, prompt: bool
) -> None:
    place(tmp_path / "folder")
    tok, oracle = Tokenizer.from_folder(tmp_path / "folder"), PreTrainedTokenizerFast.from_pretrained(tmp_path / "folder")
    want = oracle.apply_chat_template(ASK, tools=tools, add_generation_prompt=prompt, return_dict=False)
    assert tok.render_chat(ASK, tools=tools, add_generation_prompt=prompt) == want
    assert len(want) > 5


@pytest.mark.parametrize("place", [by_name, in_a_folder])
def test_a_template_can_be_named(tmp_path: Path, place: Callable[[Path], None]) -> None:
    place(tmp_path / "folder")
    tok = Tokenizer.from_folder(tmp_path / "folder")
    assert tok.decode(tok.render_chat(ASK, template="rag")).startswith("rag: ")
    assert tok.decode(tok.render_chat(ASK, tools=[TOOL], template="rag")).startswith("rag: ")
    with pytest.raises(ValueError, match=r"template='x'.*default, rag, tool_use"):
        tok.render_chat(ASK, template="x")


def test_without_a_default_one_must_be_named(tmp_path: Path) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, None, chat_template=named("rag")))
    with pytest.raises(ValueError, match="has rag, no 'default'"):
        tok.render_chat(ASK)
    assert tok.render_chat(ASK, template="rag")


def test_a_single_template_has_no_name(tmp_path: Path) -> None:
    in_settings(tmp_path)
    with pytest.raises(ValueError, match="single template"):
        Tokenizer.from_folder(tmp_path).render_chat(ASK, template="default")


def test_arguments_reach_the_template_as_text(tmp_path: Path) -> None:
    template = "{% if thinking %}{{ hint }}{{ '</s>' }}{% endif %}" + tiny.CHATML
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, template))
    plain = tok.render_chat(ASK)
    assert tok.render_chat(ASK, template_args={"thinking": False}) == plain
    assert tok.render_chat(ASK, template_args={"thinking": True, "hint": "<s>"}) == [*tok.encode("<s>"), 261, *plain]


# -------------------------------------------------------------------------------------------------------- tools


def test_functions_are_tools(tmp_path: Path) -> None:
    folder = tiny.save(tiny.byte_level(), tmp_path, tiny.QWEN3)
    tok, oracle = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    ids = tok.render_chat(ASK, tools=[look])
    assert ids.count(END) == 2 and 261 not in ids
    text = oracle.apply_chat_template(ASK, tools=[look], tokenize=False, add_generation_prompt=True)
    assert tok.decode(ids, skip_special_tokens=False) == text
    naive = oracle.apply_chat_template(ASK, tools=[look], add_generation_prompt=True, return_dict=False)
    assert naive.count(END) == 3  # self-check: the docstring would end the turn


@pytest.mark.parametrize("tools", ["look", [5], [lambda at: at], {"name": "look"}])
def test_what_is_no_tool_is_refused(tmp_path: Path, tools: Any) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, tiny.QWEN3))
    with pytest.raises(ValueError, match="tools"):
        tok.render_chat(ASK, tools=tools)


def test_the_llm_passes_tools_and_arguments_on(tmp_path: Path) -> None:
    folder = hf_models.save(hf_models.dense(vocab_size=264), tmp_path / "model")
    tiny.save(tiny.byte_level(), folder, tiny.QWEN3 + "{{ extra }}")
    llm, params = LLM(folder, dtype="float32", num_blocks=128, max_model_len=256), SamplingParams(max_tokens=1)
    completions = llm.chat([ASK, ASK], params, tools=[TOOL], template_args={"extra": "abc"})
    want = llm.tokenizer.render_chat(ASK, tools=[TOOL], template_args={"extra": "abc"})
    assert [one.prompt_token_ids for one in completions] == [want, want]
    assert want != llm.tokenizer.render_chat(ASK)


# -------------------------------------------------------------------------------------------------------- errors

BROKEN_TEMPLATES = {
    "{% for": "unexpected",
    "{{ foo.bar }}": "'foo' is undefined",
    "{{ 1 / 0 }}": "division by zero",
    "{{ 'a' + 1 }}": "concatenate",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ messages[0].content.foo() }}": "no attribute 'foo'",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "recursion",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages | foo }}": "foo",
}


@pytest.mark.parametrize("template", BROKEN_TEMPLATES)
def test_a_template_that_fails_is_quoted(tmp_path: Path, template: str) -> None:
    tok = Tokenizer.from_folder(tiny.save(tiny.byte_level(), tmp_path, template))
    with pytest.raises(ValueError, match=f"chat template of .*{BROKEN_TEMPLATES[template]}"):
        tok.render_chat(ASK)


GOOD = json.loads(tiny.byte_level().to_str())
BROKEN_FILES = {
    "empty": "",
    "no JSON": "{",
    "null": "null",
    "a list": "[]",
    "an empty object": "{}",
    "no model": json.dumps({name: value for name, value in GOOD.items() if name != "model"}),
    "an unknown model": json.dumps({**GOOD, "model": {"type": "New"}}),
    "no added tokens": json.dumps({name: value for name, value in GOOD.items() if name != "added_tokens"}),
    "half an added token": json.dumps({**GOOD, "added_tokens": [{"id": 5}]}),
    "a merge of unknown tokens": json.dumps({**GOOD, "model": {**GOOD["model"], "merges": ["a zz"]}}),
    "a vocabulary without numbers": json.dumps({**GOOD, "model": {**GOOD["model"], "vocab": {"a": "x"}}}),
    "cut short": json.dumps(GOOD)[:2000],
}
BROKEN_SETTINGS = ["{", "[]", '{"eos_token": 5}', '{"chat_template": [{"name": "x"}]}']


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, kind: str) -> None:
    tiny.save(tiny.byte_level(), tmp_path)
    (tmp_path / "tokenizer.json").write_text(BROKEN_FILES[kind])
    with pytest.raises(ValueError, match=r"its tokenizer cannot be loaded") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", BROKEN_SETTINGS)
def test_broken_tokenizer_settings_are_named(tmp_path: Path, text: str) -> None:
    tiny.save(tiny.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
        Tokenizer.from_folder(tmp_path)


def test_an_engine_with_a_broken_tokenizer_refuses_before_anything_is_queued(tmp_path: Path) -> None:
    folder = hf_models.save(hf_models.dense(vocab_size=264), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    llm = LLM(folder, dtype="float32", num_blocks=16)
    for prompt in ("text", [1, 2]):
        with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
            llm.generate(prompt if isinstance(prompt, str) else [prompt])
    assert not llm.engine.has_unfinished()
