"""A fresh model folder: the configuration and the tokenizer of a small Qwen3 whose words are those of an environment.

Owns the files of a policy that begins from random weights, weights excepted: whoever trains it writes those. The tokenizer is
256 bytes, so every text can be spelled, plus one token per given word; message headers are one special token each, so the
ChatML frame of a message costs two tokens. Invariants: decode(encode(text)) == text for every text; transformers' Auto
classes load the folder too; the same input gives the same bytes. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pearl.config import ModelOptions
from pearl.engine.plain_tokenizer import byte_alphabet

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
HEADERS = tuple(f"{START}{role}\n" for role in ROLES)
SPECIALS = (END_OF_TEXT, START, END, *HEADERS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role ' ~ message['role'] ~ ': must be system, user or assistant') -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML without the line break between messages, which would be one more token each."""


def write_model_folder(folder: str | Path, options: ModelOptions, words: Sequence[str]) -> Path:
    """Writes config.json, generation_config.json, tokenizer.json and tokenizer_config.json; returns the folder.

    Each word is one ordinary token and the longest word that fits wins; a word may contain spaces and line breaks, not a
    special token. Words of one byte have their token already. A non-ASCII word may stay spelled in bytes, see
    `is_token_text`. ValueError names a word that cannot be used or sizes that do not fit each other.
    """
    folder = Path(folder)
    _check(options, words)
    tokenizer = build_tokenizer(words)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = {text: tokenizer.token_to_id(text) for text in (END_OF_TEXT, END)}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_settings(options))
    _write(folder / "config.json", model_settings(options, -(-size // 8) * 8, ids[END], ids[END_OF_TEXT]))
    generation = {"do_sample": True, "eos_token_id": ids[END], "pad_token_id": ids[END_OF_TEXT]}
    _write(folder / "generation_config.json", generation)
    return folder


def build_tokenizer(words: Sequence[str]) -> Any:
    """The `tokenizers.Tokenizer`: token i < 256 is byte i, then the words in their order, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    kept = [word for word in dict.fromkeys(words) if len(word.encode()) > 1 and is_token_text(word)]
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in kept])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    return tokenizer


def is_token_text(word: str) -> bool:
    """Whether a byte-level decoder gives an added token back as it is.

    It takes a token whose characters all stand for bytes for those bytes; so "né" would come back as the two bytes 6E E9.
    """
    return word.isascii() or not set(word) <= set(byte_alphabet())


def model_settings(options: ModelOptions, vocab_size: int, eos: int, pad: int) -> dict[str, Any]:
    """The contents of config.json, as transformers 5 spells them."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": options.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def _tokenizer_settings(options: ModelOptions) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": options.max_position,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _check(options: ModelOptions, words: Sequence[str]) -> None:
    if isinstance(words, str):
        raise ValueError(f"words={words!r}: must be a list of words, not one text")
    for word in words:
        if not word:
            raise ValueError("words: an empty word cannot be a token")
        inside = next((text for text in SPECIALS if text in word), None)
        if inside is not None:
            raise ValueError(f"words: {word!r} contains the special token {inside!r}")
    if options.num_heads % options.num_kv_heads:
        raise ValueError(f"model.num_heads={options.num_heads}: must be a multiple of num_kv_heads={options.num_kv_heads}")
    if options.head_dim % 2:
        raise ValueError(f"model.head_dim={options.head_dim}: must be even (rotary embedding pairs)")


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
