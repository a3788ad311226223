"""Compiles launches ahead of time, for GPUs that are not there, and reads what the assembler made of them.

Owns the way from a recorded launch to numbers: registers, spilled bytes, shared memory, and the instructions that matter
(tensor core products, 16-byte reads). It knows no kernel by name. Needs a process without TRITON_INTERPRET.
Invariant: what is compiled is what `launch.run` would compile for these arguments: values of 1 become constants, sizes that
are multiples of 16 are known to be, `do_not_specialize` is obeyed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
}
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448}
"""Shared memory that one program may have, by compute capability x 10 (CUDA C++ Programming Guide); no compiler checks it."""
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA")
READS = ("LDG", "LDGSTS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A launch: a kernel and its arguments, without tensors' contents."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def key(self) -> str:
        """Equal for launches that compile to the same."""
        return repr((self.kernel.__name__, self.num_warps, self.num_stages, *_specialised(self)))


class Recorder:
    """A `Launcher` that remembers and runs nothing; for tensors on the meta device."""

    def __init__(self, chip: int) -> None:
        self.launches: list[Recorded] = []
        self._chip = chip

    def chip(self, device: torch.device) -> int:
        return self._chip

    def __call__(self, kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int = 1, **arguments: Any) -> None:
        self.launches.append(
            Recorded(kernel=kernel, grid=grid, arguments=arguments, num_warps=num_warps, num_stages=num_stages)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one launch became on one chip. `local_bytes` is memory for what did not fit into registers, per thread."""

    name: str
    chip: int
    num_warps: int
    registers: int
    local_bytes: int
    shared_bytes: int
    counts: dict[str, int]
    """How often each of PRODUCTS and READS occurs in the code, and those of READS with `.128` of 16 bytes."""


def compile_launch(recorded: Recorded, chip: int) -> Compiled:
    """Compiles for compute capability chip / 10."""
    source = ASTSource(recorded.kernel, *_specialised(recorded))
    options = {"num_warps": recorded.num_warps, "num_stages": recorded.num_stages}
    built = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    registers, local_bytes, listing = _read(built.asm["cubin"])
    return Compiled(
        name=recorded.kernel.__name__,
        chip=chip,
        num_warps=recorded.num_warps,
        registers=registers,
        local_bytes=local_bytes,
        shared_bytes=built.metadata.shared,
        counts=_counts(listing),
    )


def _specialised(recorded: Recorded) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """(signature, constants, attributes) as the just-in-time compiler derives them from the arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in recorded.kernel.params:
        value = recorded.arguments[parameter.name]
        fixed = not parameter.do_not_specialize
        if parameter.is_constexpr or (fixed and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        # Torch's allocations begin at multiples of 512 bytes, and the views that are passed at multiples of 16.
        if isinstance(value, Tensor) or (fixed and isinstance(value, int) and value % 16 == 0):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _read(cubin: bytes) -> tuple[int, int, str]:
    """(registers per thread, local memory per thread, SASS) as the disassembler tells them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if usage is None:
        raise ValueError(f"no resource usage in what {command[0]} printed: {text[:200]!r}")
    return int(usage[1]), max(int(usage[2]), int(usage[3])), text


def _counts(listing: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for instruction in re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", listing, re.MULTILINE):
        family = instruction.split(".")[0]
        if family in (*PRODUCTS, *READS):
            counts[family] += 1
        if family in READS and ".128" in instruction:
            counts[f"{family}.128"] += 1
    return dict(counts)
