"""A tiny byte-level tokenizer and the chat templates that the text tests share. Fixtures only, no tests.

The templates are written for these tests after the habits of known families: ChatML; Llama 3 (BOS, header tokens, trimmed
contents); Qwen3 (default system prompt, tools, tool replies inside a user turn, thinking dropped from history).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '</s>\n\n' + message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant</s>\n\n' }}{% endif %}"
)
QWEN3 = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.last %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
THINKING_PROMPT = CHATML.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")
"""Its generation prompt is not what history shows, so no conversation is a prefix of its continuation."""

TEMPLATES = {"chatml": CHATML, "bos": WITH_BOS, "llama3": LLAMA3, "qwen3": QWEN3}


def byte_level() -> Tokenizer:
    """256 bytes, merges ab(256) abc(257) DE(258) DEF(259), <s> 260, </s> 261, <|im_start|> 262, <|im_end|> 263; adds BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("D", "E"), ("DE", "F")]
    vocab = {token: token_id for token_id, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Metaspace words with byte fall-back, a space put before the first word: decoding depends on what stands before."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", *bytes_, "▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "ab")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def llama2_like() -> Tokenizer:
    """As `sentencepiece_like`, but its normalizer puts the space before every piece of text, after special tokens too."""
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def unigram() -> Tokenizer:
    """A Unigram model without byte fall-back whose vocabulary holds the special tokens as words of text, as T5's does."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁a", -2.5), ("ab", -3.5)]
    pieces += [(char, -3.0) for char in "abcdefghijklmnopqrstuvwxyz<>/.,!"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def word_pieces() -> Tokenizer:
    """WordPiece: a space before every token that is no continuation, and clean-up before punctuation."""
    tokens = ["[UNK]", *"abcdef.,'", "##a", "##b", "ab", "abc", "##\u00e9", "\u00e9"]
    tokenizer = Tokenizer(models.WordPiece({token: place for place, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def words_with_suffix() -> Tokenizer:
    """BPE that marks the end of a word: the space belongs to the token before, and the last token has none."""
    tokens = ["a", "b", "a</w>", "b</w>", "ab</w>", "<unk>"]
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b</w>")], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    """`byte_level` with added tokens that are not special, its decoder wrapped in a sequence."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "né\u4f60", "  ")])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


def bytes_then_replaced() -> Tokenizer:
    """`byte_level` with a second decoder behind the first: tokens are no longer known by their bytes."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("never there", "")])
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_level_in_sequence": byte_level_in_sequence,
    "sentencepiece_like": sentencepiece_like,
    "llama2_like": llama2_like,
    "unigram": unigram,
    "word_pieces": word_pieces,
    "words_with_suffix": words_with_suffix,
}


def save(tokenizer: Tokenizer, folder: Path, template: str | None = None, **settings: Any) -> Path:
    """Writes a folder that transformers can load; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
