"""Code with limits: time, memory, files, network, and that nothing is left behind."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import pytest

from pearl.rl.envs import sandbox
from pearl.rl.envs.sandbox import Limits, Ran

MIB = 1 << 20


def run(folder: Path, code: str, limits: Limits | None = None) -> Ran:
    (folder / "code.py").write_text(textwrap.dedent(code))
    return sandbox.run(folder, folder / "code.py", limits=limits)


def test_output_exit_code_and_report(tmp_path: Path) -> None:
    ran = run(tmp_path, "import os, sys; print('hello'); os.write(int(sys.argv[1]), b'7 0'); sys.exit(3)")
    assert (ran.code, ran.timed_out, ran.output, ran.report) == (3, False, "hello\n", "7 0")


def test_an_endless_loop_is_stopped_by_its_processor_time_and_a_sleep_by_the_clock(tmp_path: Path) -> None:
    ran = run(tmp_path, "while True: pass", Limits(wall_s=60, cpu_s=1))
    assert ran.code != 0 and not ran.timed_out
    began = time.monotonic()
    ran = run(tmp_path, "import time; print('so far', flush=True); time.sleep(60)", Limits(wall_s=1.5))
    assert ran.timed_out and ran.output == "so far\n" and time.monotonic() - began < 20


def test_memory_and_files_are_bounded(tmp_path: Path) -> None:
    ran = run(tmp_path, "bytearray(600 << 20)", Limits(memory_mib=256))
    assert ran.code == 1 and "MemoryError" in ran.output
    ran = run(tmp_path, "f = open('big', 'wb'); f.write(bytes(9 << 20)); f.flush()", Limits(file_mib=2))
    assert ran.code != 0 and (tmp_path / "big").stat().st_size <= 2 * MIB


def test_long_output_keeps_its_ends(tmp_path: Path) -> None:
    ran = run(tmp_path, "print('first'); print('x' * 100000); print('last')")
    assert ran.output.startswith("first\n") and ran.output.endswith("last\n") and "bytes left out" in ran.output
    assert len(ran.output) < sandbox.LONGEST_OUTPUT + 100


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            time.sleep(1.0)
            open('late', 'w').close()
            os._exit(0)
        print('started')
    """
    assert run(tmp_path, code).output == "started\n"
    time.sleep(1.5)
    assert not (tmp_path / "late").exists()


def test_the_environment_of_the_job_stays_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    ran = run(tmp_path, "import os, sys; print('A_SECRET' in os.environ, 'site' in sys.modules, sys.stdin.read() == '')")
    assert ran.output == "False False True\n"


def test_modules_of_the_folder_do_not_hide_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("print('mine')")
    (tmp_path / "own.py").write_text("print('own')")
    assert run(tmp_path, "import json, own").output == "own\n"


def test_without_a_network_nobody_is_reached(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run(tmp_path, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('rea' + 'ched')")
    if not ran.isolated:
        pytest.skip("this kernel gives a user no namespaces of his own")
    assert "reached\n" not in ran.output and "OSError" in ran.output and ran.code == 1
    assert run(tmp_path, "import os; print(os.getpid())").output == "1\n"
    assert os.getpid() != 1
