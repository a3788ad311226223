"""Builds `pearl._C`: the host part with any C++17 compiler, the CUDA part too where nvcc is found.

The .cu files know nothing of torch (raw pointers, a stream as an argument) and are linked with the static CUDA runtime, so
the module needs neither torch to build nor a GPU to load. If a part cannot be built, this says so in plain words and the
install goes on: `pearl` then takes its torch paths. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

HEADERS = sorted(str(path) for pattern in ("*.h", "*.inl") for path in Path("csrc").rglob(pattern))
ISA_SOURCES = sorted(str(path) for path in Path("csrc/cpu").glob("kernels_*.cpp"))
HOST_SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp") if str(path) not in ISA_SOURCES)
CUDA_SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cu"))
GPU_ARCHITECTURES = ("80", "90", "100")

AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ISA_FLAGS = {"portable": [], "avx2": AVX2, "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16"]}
"""Flags of csrc/cpu/kernels_<isa>.cpp; which of them runs is decided on the machine that it runs on."""
# Nothing is contracted to an fma but what says so: the same sum has the same bits wherever it is inlined. (GCC 12 takes its own
# headers' undefined vectors for uses of uninitialised ones.)
KERNEL_FLAGS = ["-O2", "-ffp-contract=off", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]


def say(text: str) -> None:
    """One line to the user, past setuptools' own log."""
    print(f"pearl: {text}", file=sys.stderr, flush=True)


def find_nvcc() -> tuple[str, Path] | None:
    """(nvcc, folder of libcudart_static.a), or None if there is no complete CUDA toolkit."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    beside = Path(home) / "bin" / "nvcc"
    nvcc = str(beside) if beside.is_file() else shutil.which("nvcc")
    if nvcc is None:
        return None
    roots = dict.fromkeys([Path(home), Path(os.path.realpath(nvcc)).parent.parent])
    folders = [root / name for root in roots for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")]
    found = [folder for folder in folders if (folder / "libcudart_static.a").is_file()]
    return (nvcc, found[0]) if found else None


def architecture_flags(nvcc: str) -> list[str]:
    """-gencode flags: machine code for the architectures this nvcc knows, and PTX of the newest for GPUs to come."""
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    ours = [number for number in GPU_ARCHITECTURES if f"compute_{number}" in known]
    if not ours:
        raise OSError(f"{nvcc} knows none of sm_{', sm_'.join(GPU_ARCHITECTURES)}")
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ours]
    return [*flags, f"-gencode=arch=compute_{ours[-1]},code=compute_{ours[-1]}"]


class BuildNative(build_ext):
    """build_ext that adds the CUDA objects first and turns failures into a sentence."""

    def run(self) -> None:
        toolkit = find_nvcc()
        if toolkit is None:
            say("no CUDA toolkit found (nvcc and libcudart_static.a; set CUDA_HOME if there is one): building for the CPU only")
        else:
            try:
                self.add_cuda(*toolkit)
            except (OSError, subprocess.CalledProcessError) as error:
                say(f"the CUDA part could not be compiled ({error}): building for the CPU only")
        super().run()

    def add_cuda(self, nvcc: str, libraries: Path) -> None:
        """Compiles the .cu files and makes them part of the extension; changes nothing if that fails."""
        target = Path(self.build_temp)
        target.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-std=c++17", "-Icsrc", "-Xcompiler", "-fPIC,-fvisibility=hidden", *architecture_flags(nvcc)]
        objects = []
        for source in CUDA_SOURCES:
            output = str(target / (Path(source).stem + ".cu.o"))
            subprocess.run([nvcc, *flags, "-c", source, "-o", output], check=True)
            objects.append(output)
        for extension in self.extensions:
            extension.extra_objects += objects
            extension.define_macros.append(("PEARL_CUDA", "1"))
            extension.library_dirs.append(str(libraries))
            extension.libraries += ["cudart_static", "dl", "rt", "pthread"]

    def add_kernels(self, ext: Pybind11Extension) -> None:
        """Compiles the CPU kernels, each file with the flags of its instruction set; leaves out what this compiler refuses."""
        ours = platform.machine().lower() in ("x86_64", "amd64")
        for isa in ISA_FLAGS if ours else ("portable",):
            flags = [*ext.extra_compile_args, *KERNEL_FLAGS, *ISA_FLAGS[isa]]
            source = f"csrc/cpu/kernels_{isa}.cpp"
            try:
                made = self.compiler.compile(
                    [source], output_dir=self.build_temp, include_dirs=ext.include_dirs, extra_postargs=flags
                )
            except CompileError as error:
                if isa == "portable":
                    raise
                say(f"the {isa} kernels could not be compiled ({error}): building without them")
                continue
            ext.extra_objects += made
            ext.define_macros.append((f"PEARL_CPU_{isa.upper()}", "1"))

    def build_extension(self, ext: Pybind11Extension) -> None:
        try:
            self.add_kernels(ext)
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:  # ext.optional: setuptools goes on without it
            say(f"{ext.name} could not be built ({error}); is there a C++ compiler (g++ or clang++, or CXX)?")
            say("installing without it: everything works, moving KV blocks is slower")
            raise


native = Pybind11Extension(
    "pearl._C",
    HOST_SOURCES,
    include_dirs=["csrc"],
    depends=[*HEADERS, *CUDA_SOURCES, *ISA_SOURCES],
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
