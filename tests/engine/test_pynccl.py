"""The binding of NCCL against a library with the prototypes of nccl.h, which writes down how it is called."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pearl.engine.comm.communicator import CollectiveError
from pearl.engine.comm.pynccl import LIBRARY, SIGNATURES, Nccl, NcclComm, NcclUnavailable, _wheel_library

SOURCE = r"""
#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct ncclComm* ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;
typedef void* cudaStream_t;
typedef struct { size_t size; unsigned int magic; unsigned int version; int blocking; int cgaClusterSize; int minCTAs;
                 int maxCTAs; const char* netName; } ncclConfig_t;
static int rounds, state;
static void say(const char* format, ...) {
  FILE* file = fopen(getenv("FAKE_NCCL_LOG"), "a");
  va_list list; va_start(list, format); vfprintf(file, format, list); va_end(list);
  fputc('\n', file); fclose(file);
}
static int number(const char* name) { const char* text = getenv(name); return text ? atoi(text) : 0; }
static ncclResult_t begun(void) { rounds = number("FAKE_NCCL_ROUNDS"); return rounds ? 7 : number("FAKE_NCCL_RESULT"); }
ncclResult_t ncclGetVersion(int* version) { *version = number("FAKE_NCCL_VERSION"); return 0; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i + 100); return 0; }
const char* ncclGetErrorString(ncclResult_t result) { return result == 6 ? "remote process exited" : "fault"; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* c) {
  say("init %d %d %d %d", nranks, rank, (unsigned char)id.internal[0], (unsigned char)id.internal[127]);
  say("config %d %x %d %d %d %d", c->size == sizeof(*c), c->magic, c->version, c->blocking,
      c->cgaClusterSize == INT_MIN && c->minCTAs == INT_MIN && c->maxCTAs == INT_MIN, c->netName == NULL);
  *comm = (ncclComm_t)0x123456789aULL; return begun(); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  *result = rounds-- > 1 ? 7 : number("FAKE_NCCL_RESULT"); return comm == (ncclComm_t)0x123456789aULL ? 0 : 4; }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { say("finalize %p", comm); return begun(); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { say("destroy %p", comm); return 0; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { say("abort %p", comm); return 0; }
ncclResult_t ncclGroupStart(void) { say("start"); return 0; }
ncclResult_t ncclGroupEnd(void) { say("end"); return begun(); }
ncclResult_t ncclSend(const void* b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  say("send %p %zu %d %d %p %p", b, n, t, peer, c, s); return begun(); }
ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  say("recv %p %zu %d %d %p %p", b, n, t, peer, c, s); return begun(); }
ncclResult_t ncclBroadcast(const void* a, void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  say("broadcast %p %p %zu %d %d %p %p", a, b, n, t, root, c, s); return begun(); }
ncclResult_t ncclAllReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c, cudaStream_t s) {
  say("allreduce %p %p %zu %d %d %p %p", a, b, n, t, o, c, s); return begun(); }
"""
HANDLE, STREAM = "0x123456789a", 0xABCDEF0123
COMPILER = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "fake.c").write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(folder / "fake.so"), str(folder / "fake.c")], check=True)
    return str(folder / "fake.so")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_NCCL_LOG", str(log))
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22703")

    def read() -> list[str]:
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    return read


@needs_compiler
def test_each_call_arrives_as_it_was_meant(library: str, calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_ROUNDS", "3")  # everything is in progress at first
    nccl = Nccl(library)
    identity = nccl.unique_id()
    assert nccl.version == 22703 and identity == bytes((i + 100) % 256 for i in range(128))
    comm = NcclComm(nccl, identity, 1, 2, 5.0)
    assert calls() == ["init 2 1 100 227", "config 1 cafebeef 21700 0 1 1"]
    tensor = torch.zeros(6, dtype=torch.bfloat16)
    place, end = hex(tensor.data_ptr()), f"{HANDLE} {hex(STREAM)}"
    comm.group_start()
    comm.send(tensor, 0, STREAM)
    comm.recv(tensor, 0, STREAM)
    comm.group_end()
    comm.broadcast(tensor, 0, STREAM)
    comm.all_reduce_sum(tensor.float(), STREAM)
    seen = calls()
    assert seen[:5] == [
        "start",
        f"send {place} 6 9 0 {end}",
        f"recv {place} 6 9 0 {end}",
        "end",
        f"broadcast {place} {place} 6 9 0 {end}",
    ]
    assert seen[5].startswith("allreduce") and seen[5].endswith(f" 6 7 0 {end}")
    comm.destroy()
    assert calls() == [f"finalize {HANDLE}", f"destroy {HANDLE}"]
    with pytest.raises(CollectiveError, match="ncclSend: this communicator was left or aborted"):
        comm.send(tensor, 0, STREAM)


@needs_compiler
def test_a_member_that_is_lost_or_late_ends_in_an_abort(library: str, calls, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(library)
    comm = NcclComm(nccl, nccl.unique_id(), 0, 2, 0.2)
    monkeypatch.setenv("FAKE_NCCL_RESULT", "6")
    with pytest.raises(CollectiveError, match=r"ncclRecv: remote process exited \(6\)"):
        comm.recv(torch.zeros(2), 1, STREAM)
    assert calls()[-1] == f"abort {HANDLE}"
    comm.abort()  # once is enough
    assert calls() == []
    monkeypatch.setenv("FAKE_NCCL_ROUNDS", "1000000")
    with pytest.raises(CollectiveError, match="a group of 2, member 0: not through within 0.2 s"):
        NcclComm(nccl, nccl.unique_id(), 0, 2, 0.2)
    assert calls()[-1] == f"abort {HANDLE}"


@needs_compiler
def test_what_cannot_be_right_is_refused_before_the_call(library: str, calls) -> None:
    nccl = Nccl(library)
    with pytest.raises(ValueError, match="unique_id: has 3 bytes, must be 128"):
        NcclComm(nccl, b"abc", 0, 2, 1.0)
    with pytest.raises(ValueError, match="rank=2: must be 0 to 1"):
        NcclComm(nccl, nccl.unique_id(), 2, 2, 1.0)
    comm = NcclComm(nccl, nccl.unique_id(), 0, 2, 1.0)
    calls()
    with pytest.raises(ValueError, match="ncclBroadcast: member 2, must be 0 to 1"):
        comm.broadcast(torch.zeros(2), 2, STREAM)
    for wrong in (torch.zeros(2, dtype=torch.complex64), torch.zeros(4, 4).t()[1:]):
        with pytest.raises(ValueError, match="must be contiguous, of torch.int8"):
            comm.send(wrong, 1, STREAM)
    assert calls() == []


@needs_compiler
def test_a_library_that_is_too_old_is_refused(library: str, calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", "21005")
    with pytest.raises(NcclUnavailable, match="is version 21005, 21403 or later is needed"):
        Nccl(library)


def test_where_there_is_no_nccl_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(NcclUnavailable, match=f"cannot be loaded from {tmp_path}/{LIBRARY}: .*No such file"):
        Nccl(str(tmp_path / LIBRARY))
    if _wheel_library() is None and not torch.cuda.is_available():
        with pytest.raises(NcclUnavailable, match=f"cannot be loaded from {LIBRARY}"):
            Nccl()


@needs_compiler
def test_every_function_that_is_bound_is_in_the_stand_in(library: str) -> None:
    assert all(f"{name}(" in SOURCE for name in SIGNATURES)
