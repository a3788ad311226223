"""Hugging Face safetensors folders in and out.

Owns file names, the index of shards, and the check that a folder holds exactly the tensors a ModelConfig needs; tensor names
come from `param_specs` alone. Knows nothing of versions or of a running engine. Invariants: nothing is yielded from a folder
that does not fit; a folder is never seen half written (files are written aside, flushed and renamed, weights last).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pearl.engine.models.config import ModelConfig, to_hf
from pearl.engine.models.params import hf_shapes, param_specs

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHARD_BYTES = 5 << 30
"""Bytes of weights in one file unless asked otherwise: what transformers writes."""
SHARD_STEMS = ("model", "weights")
FLOAT_KINDS = ("F64", "F32", "F16", "BF16")
COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files beside the weights that make a folder usable: configuration, tokenizer, chat template, generation defaults."""


def read_folder(folder: str | Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, tensor on the CPU in the file's dtype), one tensor in memory at a time.

    The whole set is checked first: one ValueError lists what is missing, unexpected, mis-shaped or not floating point. With
    tied embeddings an `lm_head.weight` equal to the embedding is skipped; a different one is an error. Experts may lie one by
    one or stacked, and are yielded as they lie.
    """
    folder = Path(folder)
    problems: list[str] = []
    try:
        files = _locate(folder)
        present = {name for names in files.values() for name in names}
        needed = _needed(present, config)
        allowed = {**needed, HEAD: needed[EMBEDDING]} if config.tie_embeddings else needed
        for path, names in files.items():
            with safe_open(path, framework="pt") as file:
                problems += _problems_in(file, names, allowed)
    except SafetensorError as error:
        raise ValueError(f"model={str(folder)!r}: a weight file is damaged: {error}") from error
    problems += [f"{name}: missing" for name in needed if name not in present]
    if not problems and config.tie_embeddings and HEAD in present:
        if not torch.equal(_read_one(files, HEAD), _read_one(files, EMBEDDING)):
            problems.append(f"{HEAD}: differs from {EMBEDDING}, but config.json says tie_word_embeddings")
    if problems:
        raise ValueError(f"model={str(folder)!r}: weights do not fit config.json: {listed(problems)}")
    return _tensors(files, config)


def hf_tensors(config: ModelConfig, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The whole model's parameters under their Hugging Face names, as views; experts one by one."""
    for spec in param_specs(config):
        value = params[spec.name].detach()
        for part in spec.parts:
            yield part.hf_name, value[part.target_index]


def save_folder(
    folder: str | Path,
    config: ModelConfig,
    params: Mapping[str, Tensor],
    *,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads to the same logits: weights, `config.json`, and the companions of `like`.

    Without `like` a `config.json` already there is kept, else one is made from `config`. Its dtype becomes that of the weights,
    which are one file, or several of at most `shard_bytes` (one tensor at least) and an index. A new folder appears by one
    rename; in an existing one each file is replaced in turn, and at each moment its weights are the old or the new ones.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be >= 1")
    folder = Path(folder)
    if folder.is_dir():
        _write(folder, config, params, folder if like is None else Path(like), shard_bytes)
        return
    aside = folder.with_name(f".{folder.name}.writing.{os.getpid()}")
    aside.mkdir(parents=True)
    try:
        _write(aside, config, params, aside if like is None else Path(like), shard_bytes)
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside)
        raise


def is_derived(name: str) -> bool:
    """Whether a tensor follows from the configuration (old files carry rotary tables); such tensors are ignored."""
    return name.endswith("rotary_emb.inv_freq")


def listed(problems: Iterable[str], limit: int = 20) -> str:
    """The first problems in one line, and how many more there are."""
    items = list(problems)
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def _write(target: Path, config: ModelConfig, params: Mapping[str, Tensor], source: Path, shard_bytes: int) -> None:
    if source.resolve() != target.resolve():
        for path in _companions(source):
            with _replacing(target / path.name) as aside:
                shutil.copyfile(path, aside)
    tensors = dict(hf_tensors(config, params))
    with _replacing(target / "config.json") as aside:
        aside.write_text(json.dumps(_config_json(target / "config.json", config, tensors), indent=2) + "\n")
    shards = _shards(tensors, shard_bytes)
    old = _shards_of(target)
    if len(shards) == 1:
        _save(shards[0], target / WEIGHTS)
        (target / INDEX).unlink(missing_ok=True)
    else:
        # What the present index names must stay whole until the new index takes its place, so names are not used again.
        numbers = [f"{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        stem = next(stem for stem in SHARD_STEMS if not old & {f"{stem}-{number}" for number in numbers})
        files = {f"{stem}-{number}": shard for number, shard in zip(numbers, shards, strict=True)}
        for name, shard in files.items():
            _save(shard, target / name)
        with _replacing(target / INDEX) as aside:
            aside.write_text(json.dumps(_index(files), indent=2) + "\n")
        old |= {WEIGHTS}  # transformers would read it, and not the index
        old -= files.keys()
    for name in old:
        (target / name).unlink(missing_ok=True)


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    with _replacing(path) as aside:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, aside, metadata={"format": "pt"})


def _index(files: Mapping[str, Mapping[str, Tensor]]) -> dict:
    size = sum(tensor.nbytes for shard in files.values() for tensor in shard.values())
    return {"metadata": {"total_size": size}, "weight_map": {name: file for file, shard in files.items() for name in shard}}


def _shards_of(folder: Path) -> set[str]:
    """The files of the sharded checkpoint that lies there, if one does."""
    index = folder / INDEX
    return set(json.loads(index.read_text())["weight_map"].values()) - {WEIGHTS} if index.is_file() else set()


def _locate(folder: Path) -> dict[Path, list[str]]:
    """Weight file -> names to read from it: what the index says, or all of the single file."""
    index, single = folder / INDEX, folder / WEIGHTS
    if index.is_file():
        files: dict[Path, list[str]] = {}
        for name, file in (json.loads(index.read_text()).get("weight_map") or {}).items():
            files.setdefault(folder / file, []).append(name)
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise ValueError(f"model={str(folder)!r}: {INDEX} names files that are not there: {listed(absent)}")
        return files
    if not single.is_file():
        raise ValueError(f"model={str(folder)!r}: has neither {WEIGHTS} nor {INDEX} (only safetensors are read)")
    with safe_open(single, framework="pt") as file:
        return {single: list(file.keys())}


def _needed(present: set[str], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors a folder must have, in the form in which its experts are.

    Where both forms lie the one of single experts is expected: the stacked tensors are then listed as unexpected.
    """
    single, stacked = hf_shapes(config), hf_shapes(config, stacked=True)
    return stacked if present & (stacked.keys() - single.keys()) and not present & (single.keys() - stacked.keys()) else single


def _problems_in(file, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    held = set(file.keys())
    problems = []
    for name in names:
        if is_derived(name):
            continue
        if name not in held:
            problems.append(f"{name}: in {INDEX} but not in its file")
        elif name not in shapes:
            problems.append(f"{name}: unexpected")
        else:
            view = file.get_slice(name)
            if tuple(view.get_shape()) != shapes[name]:
                problems.append(f"{name}: shape {tuple(view.get_shape())}, must be {shapes[name]}")
            if view.get_dtype() not in FLOAT_KINDS:
                problems.append(f"{name}: dtype {view.get_dtype()}, must be one of {', '.join(FLOAT_KINDS)}")
    return problems


def _read_one(files: dict[Path, list[str]], name: str) -> Tensor:
    path = next(path for path, names in files.items() if name in names)
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _tensors(files: dict[Path, list[str]], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                if not is_derived(name) and not (config.tie_embeddings and name == HEAD):
                    yield name, file.get_tensor(name)


def _companions(folder: Path) -> list[Path]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"like={str(folder)!r}: not a Hugging Face model folder (no config.json)")
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not path.name.endswith(".index.json"))


def _config_json(path: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict:
    """The folder's own configuration (or one made from `config`) with the dtype that is being written."""
    content = json.loads(path.read_text()) if path.is_file() else to_hf(config)
    content.pop("torch_dtype", None)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    return {**content, "dtype": dtype}


class _replacing:
    """Gives a path beside `path` to write to; on success it is flushed to disk and takes the name, on failure removed."""

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_name(f".{path.name}.writing.{os.getpid()}")

    def __enter__(self) -> Path:
        return self._aside

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._aside.unlink(missing_ok=True)
            return
        with open(self._aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._aside, self._path)
