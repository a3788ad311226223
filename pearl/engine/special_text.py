"""Special tokens in text: where a template wrote one, and how contents that spell one are kept apart from it.

Pure functions of strings; owns no tokenizer and knows no template. Invariant: a marked string contains no special token and
none can arise from two marked strings side by side; undoing the stand-ins gives the string back. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any


class ContentMarker:
    """Makes special tokens inside contents unrecognisable while a template works on them.

    The first character of each is replaced by a private-use character that occurs nowhere else; lengths stay, and a template
    can go on trimming, splitting and comparing. The beginning of a special token at the end of a string is treated alike,
    since a template may write two strings side by side.
    """

    def __init__(self, specials: list[str]) -> None:
        first = "".join(sorted({re.escape(text[0]) for text in specials}))
        self._starts = re.compile(f"(?=[{first}])(?=(?:{'|'.join(map(re.escape, specials))}))") if specials else None
        self._prefixes = {text[:size] for text in specials for size in range(1, len(text))}
        self._longest = max(map(len, specials), default=0)

    def mark(self, value: Any, template: str) -> tuple[Any, dict[int, str]]:
        """(nested lists and dicts with marked strings, {code of a stand-in: the character it stands for}).

        The same `value` if nothing is to be hidden. `template`: text whose characters cannot be stand-ins.
        """
        strings = list(_strings_of(value))
        hidden = {text[place] for text in strings for place in self._places(text)}
        if not hidden:
            return value, {}
        used = set(template).union(*strings)
        free = (code for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)
        standin_of = {char: chr(code) for char, code in zip(sorted(hidden), free, strict=False)}
        return self._marked(value, standin_of), {ord(to): char for char, to in standin_of.items()}

    def _places(self, text: str) -> list[int]:
        """Positions at which a special token begins, or may begin at the end of the string."""
        if self._starts is None:
            return []
        inside = [match.start() for match in self._starts.finditer(text)]
        sizes = range(1, min(self._longest, len(text) + 1))
        return inside + [len(text) - size for size in sizes if text[-size:] in self._prefixes]

    def _marked(self, value: Any, standin_of: dict[str, str]) -> Any:
        if isinstance(value, str):
            chars = list(value)
            for place in self._places(value):
                chars[place] = standin_of[value[place]]
            return "".join(chars)
        if isinstance(value, dict):
            return {self._marked(key, standin_of): self._marked(inner, standin_of) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(inner, standin_of) for inner in value]
        return value


def special_pattern(specials: Iterable[Any]) -> re.Pattern[str]:
    """Finds special tokens (tokenizers' AddedToken) in text the way the tokenizer does: leftmost, then longest.

    A token that strips takes the white space on that side with it; one of a single word stands between no word characters.
    """
    pieces = []
    for token in sorted(specials, key=lambda token: len(token.content), reverse=True):
        before, after = (r"\s*" if flag else "" for flag in (token.lstrip, token.rstrip))
        alone = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
        pieces.append(before + alone[0] + re.escape(token.content) + alone[1] + after)
    return re.compile("|".join(pieces) or "(?!)")


def _strings_of(value: Any) -> Iterator[str]:
    """All strings in nested lists and dicts, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings_of(key)
            yield from _strings_of(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings_of(inner)
