"""The helper threads of the CPU kernels: every chunk once, errors, forks, exits, a busy machine; and the choice of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from native_cases import ISAS, cpu, using

RUN = [sys.executable, "-c"]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a process of its own, in which `cpu` is there."""
    code = "from pearl import _C\ncpu = _C.cpu\n" + code
    return subprocess.run([*RUN, code], capture_output=True, text=True, timeout=60, env=os.environ | environment)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_chunk_runs_once(threads: int) -> None:
    with using(threads=threads):
        assert cpu.threads() == threads
        for chunks in (0, 1, 2, 3, 7, 64, 1000):
            for _ in range(30):
                assert cpu.count_chunks(chunks) == [1] * chunks


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_what_a_chunk_throws_reaches_the_caller(threads: int) -> None:
    """On whichever thread it ran; and the next loop is none the worse."""
    with using(threads=threads):
        for fail_at in (0, 3, 99) * 10:
            with pytest.raises(RuntimeError, match=f"chunk {fail_at} failed"):
                cpu.count_chunks(100, fail_at)
            assert cpu.count_chunks(50) == [1] * 50


def test_the_number_of_threads_may_change_between_loops() -> None:
    with using(threads=2):
        for threads in (1, 4, 2, 3) * 5:
            cpu.set_threads(threads)
            assert cpu.count_chunks(200) == [1] * 200
        with pytest.raises(ValueError, match="threads=0: must be >= 1"):
            cpu.set_threads(0)


def test_loops_of_several_callers_at_once() -> None:
    """One of them has the helpers, the others run their chunks alone."""
    wrong: list[list[int]] = []

    def call() -> None:
        for _ in range(200):
            counts = cpu.count_chunks(40)
            if counts != [1] * 40:
                wrong.append(counts)

    with using(threads=3):
        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []


def test_a_process_ends_with_its_helpers_asleep_or_awake() -> None:
    for wait in ("0", "0.05"):
        done = python(f"import time\ncpu.set_threads(4)\ncpu.count_chunks(100)\ntime.sleep({wait})\nprint('end')")
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_no_thread_before_the_first_loop() -> None:
    count = "print(len(os.listdir('/proc/self/task')))\n"
    code = f"import os\ncpu.set_threads(4)\n{count}cpu.count_chunks(9)\n{count}"
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads are counted in /proc")
    assert python(code).stdout.split() == ["1", "4"]


def test_a_forked_child_makes_its_own_helpers() -> None:
    code = """
import os
cpu.set_threads(3)
for _ in range(20):
    assert cpu.count_chunks(100) == [1] * 100
    child = os.fork()
    if child == 0:
        good = all(cpu.count_chunks(100) == [1] * 100 for _ in range(20))
        os._exit(0 if good else 1)
    assert cpu.count_chunks(100) == [1] * 100
    assert os.waitpid(child, 0)[1] == 0
print("done")
"""
    done = python(code)
    assert done.stdout == "done\n", done.stderr


def test_signals_are_left_to_python() -> None:
    """A helper takes none, so that the handler runs at once in the main thread."""
    code = """
import os, signal
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
cpu.set_threads(4)
cpu.count_chunks(100)
masks = [line.split()[1] for task in os.listdir("/proc/self/task") for line in open(f"/proc/self/task/{task}/status")
         if line.startswith("SigBlk")]
usr1 = 1 << (signal.SIGUSR1 - 1)
print(sum(1 for mask in masks if int(mask, 16) & usr1))
os.kill(os.getpid(), signal.SIGUSR1)
print(len(got))
"""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("signal masks are read in /proc")
    done = python(code)
    assert done.stdout.split() == ["3", "1"], done.stderr


def test_the_environment_chooses_the_instruction_set() -> None:
    for isa in ISAS:
        assert python("print(cpu.isa())", PEARL_CPU_ISA=isa).stdout.strip() == isa
    assert python("print(cpu.isa())", PEARL_CPU_ISA="").stdout.strip() == ISAS[-1]


def test_an_unknown_instruction_set_is_refused() -> None:
    code = "try:\n    cpu.isa()\nexcept ValueError as error:\n    print(error)"
    said = python(code, PEARL_CPU_ISA="sse9").stdout
    assert said.startswith("PEARL_CPU_ISA=sse9: must be one of") and said.strip().endswith(", ".join(ISAS))
    with pytest.raises(ValueError, match="isa=sse9"):
        cpu.use_isa("sse9")
