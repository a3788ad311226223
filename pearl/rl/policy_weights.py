"""The policy's weights, between a decoder (whole or cut over ranks) and the Hugging Face names and folders of others.

Owns filling a decoder and gathering what it holds. It does not know optimizers, steps or who asks.
Invariant: a decoder that is cut holds the same values as a whole one filled from the same folder or seed.

Functions that gather are collectives of the ranks that the decoder is cut over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from pearl.engine.models.decoder import Decoder, random_weights
from pearl.engine.models.params import all_parts, param_specs
from pearl.engine.weights.checkpoint import read_folder, save_folder
from pearl.rl.sharding import whole, write_region


def fill_from_folder(decoder: Decoder, folder: Path) -> None:
    """Reads a Hugging Face folder, one tensor in memory at a time; ValueError, before anything changes, if it does not fit."""
    parameters = dict(decoder.named_parameters())
    places = {part.hf_name: (spec.name, part) for spec in param_specs(decoder.config) for part in all_parts(spec)}
    for hf_name, tensor in read_folder(folder, decoder.config):
        name, part = places[hf_name]
        write_region(parameters[name], part.target, tensor)


def fill_from_seed(decoder: Decoder, seed: int) -> None:
    """Random weights, the same on any number of ranks."""
    parameters = dict(decoder.named_parameters())
    for name, tensor in random_weights(decoder.config, seed):
        write_region(parameters[name], tuple((0, size) for size in tensor.shape), tensor)


def fill(decoder: Decoder, folder: Path, seed: int, *, keep: bool) -> None:
    """From the folder, or if it has no weights from the seed; then the rank that is to `keep` them writes them there."""
    if any(folder.glob("*.safetensors")):
        fill_from_folder(decoder, folder)
        return
    fill_from_seed(decoder, seed)
    # Gathering makes the ranks wait for each other: none finds another's file before having looked for it.
    held = gathered(decoder, keep=keep)
    if held:
        save_folder(folder, decoder.config, held, like=folder)


def named_hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Views of the present weights under their Hugging Face names; a parameter is gathered when its first one is asked for."""
    parameters = dict(decoder.named_parameters())
    for spec in param_specs(decoder.config):
        value = whole(parameters[spec.name])
        for part in spec.parts:
            yield part.hf_name, value[part.target_index]


def gathered(decoder: Decoder, *, keep: bool) -> dict[str, Tensor]:
    """All parameters, whole and on the host, on the ranks that `keep` them, nothing on the others."""
    held: dict[str, Tensor] = {}
    parameters = dict(decoder.named_parameters())  # a value head is among them
    for name in (spec.name for spec in param_specs(decoder.config)):
        tensor = whole(parameters[name])
        if keep:
            held[name] = tensor.cpu()
    return held
