"""A stand-in for libnccl that really moves bytes, between host memory of two processes or threads, over a socket. No tests.

Prototypes as in NVIDIA's nccl.h. Communicators are non-blocking: a group's sends and receives are carried out by a thread, and
are in progress until they are through. Members meet at a path that is in the unique id.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.engine.comm.pynccl import Nccl
from pearl.engine.migration.nccl import NcclCarrier, NcclTransport
from pearl.engine.migration.peer_link import Carrier
from pearl.engine.migration.transport import Pool

SOURCE = r"""
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;
typedef void* cudaStream_t;
typedef struct { char* data; size_t bytes; int out; } op;
typedef struct fake {
  int rank, fd, count; atomic_int state, stop, users; char path[100]; op* ops; intptr_t stream;
} *ncclComm_t;
enum { OK = 0, REMOTE = 6, IN_PROGRESS = 7 };
static atomic_int running[4096];
static atomic_long moved_messages;
static __thread int depth; static __thread ncclComm_t open_comm;
static void nap(void) { struct timespec t = {0, 1000000}; nanosleep(&t, NULL); }
static void leave(ncclComm_t c) { if (atomic_fetch_sub(&c->users, 1) == 1) { if (c->fd >= 0) close(c->fd); free(c); } }
int fake_running(int stream) { return atomic_load(&running[stream]); }
long fake_messages(void) { return atomic_load(&moved_messages); }

static void* join_peer(void* p) {
  ncclComm_t c = p; struct sockaddr_un at = {.sun_family = AF_UNIX};
  strncpy(at.sun_path, c->path, sizeof(at.sun_path) - 1);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), peer = -1;
  if (c->rank == 0) {
    unlink(c->path);
    if (bind(fd, (void*)&at, sizeof(at)) == 0 && listen(fd, 1) == 0)
      while (!c->stop && peer < 0) {
        struct timeval wait = {0, 20000}; setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
        peer = accept(fd, NULL, NULL); }
    close(fd); unlink(c->path);
  } else {
    while (!c->stop && connect(fd, (void*)&at, sizeof(at))) nap();
    peer = fd;
  }
  c->fd = peer; c->state = c->stop || peer < 0 ? REMOTE : OK;
  leave(c); return NULL;
}
static void* move(void* p) {
  ncclComm_t c = p; int failed = 0;
  for (int i = 0; i < c->count && !failed; i++) {
    size_t left = c->ops[i].bytes; char* at = c->ops[i].data;
    while (left && !failed) {
      ssize_t n = c->ops[i].out ? send(c->fd, at, left, MSG_NOSIGNAL) : recv(c->fd, at, left, 0);
      if (n <= 0) failed = 1; else { at += n; left -= n; }
    }
    if (!failed) moved_messages++;
  }
  free(c->ops); c->ops = NULL; c->count = 0;
  running[c->stream]--; c->state = failed ? REMOTE : OK;
  leave(c); return NULL;
}
static ncclResult_t begin(ncclComm_t c, void* (*work)(void*)) {
  pthread_t thread; c->state = IN_PROGRESS; c->users++;
  if (pthread_create(&thread, NULL, work, c)) return 1;
  pthread_detach(thread); return IN_PROGRESS;
}
ncclResult_t ncclGetVersion(int* version) { *version = 22703; return OK; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static atomic_int count; memset(id, 0, sizeof(*id));
  snprintf(id->internal, 100, "%s/nccl-%d-%d", getenv("FAKE_NCCL_FOLDER"), getpid(), count++); return OK; }
const char* ncclGetErrorString(ncclResult_t r) { return r == REMOTE ? "remote process exited" : "fault"; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, void* config) {
  ncclComm_t c = calloc(1, sizeof(*c)); c->rank = rank; c->fd = -1; c->users = 1;
  memcpy(c->path, id.internal, 100); *comm = c; return begin(c, join_peer); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* r) { if (!c) return 4; *r = c->state; return OK; }
ncclResult_t ncclCommAbort(ncclComm_t c) { c->stop = 1; if (c->fd >= 0) shutdown(c->fd, SHUT_RDWR); leave(c); return OK; }
ncclResult_t ncclCommFinalize(ncclComm_t c) { return OK; }
ncclResult_t ncclCommDestroy(ncclComm_t c) { return ncclCommAbort(c); }
ncclResult_t ncclGroupStart(void) { depth++; return OK; }
ncclResult_t ncclGroupEnd(void) {
  ncclComm_t c = open_comm; depth--; open_comm = NULL;
  if (!c) return OK;
  running[c->stream]++; return begin(c, move); }
static ncclResult_t add(ncclComm_t c, void* data, size_t count, int type, int out, cudaStream_t s) {
  static const int size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  c->ops = realloc(c->ops, (c->count + 1) * sizeof(op)); c->stream = (intptr_t)s;
  c->ops[c->count++] = (op){data, count * size[type], out}; open_comm = c;
  if (depth) return OK;
  depth++; return ncclGroupEnd(); }
ncclResult_t ncclSend(const void* b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return add(c, (void*)b, n, t, 1, s); }
ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
  return add(c, b, n, t, 0, s); }
ncclResult_t ncclBroadcast(const void* a, void* b, size_t n, int t, int root, ncclComm_t c, cudaStream_t s) { return 5; }
ncclResult_t ncclAllReduce(const void* a, void* b, size_t n, int t, int o, ncclComm_t c, cudaStream_t s) { return 5; }
"""
COMPILER = shutil.which("gcc") or shutil.which("cc")
_numbers = itertools.count(1)


def build(folder: Path) -> str:
    """Compiles it into `folder`; the library's path."""
    (folder / "fake.c").write_text(SOURCE)
    command = [str(COMPILER), "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o", str(folder / "fake.so")]
    subprocess.run([*command, str(folder / "fake.c")], check=True)
    return str(folder / "fake.so")


class HostStream:
    """In place of a CUDA stream: what is queued is carried out by the library's threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self.number = library, next(_numbers)

    def after(self, queue: Any) -> None:
        raise AssertionError("host memory has no stream")

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Callable[[], bool]:
        return lambda: self._library.fake_running(self.number) == 0


class HostNccl(NcclTransport):
    """The transport on host memory, by the stand-in."""

    def __init__(self, library: str, timeout_s: float = 5.0) -> None:
        super().__init__(timeout_s=timeout_s)
        self.library, self._nccl = ctypes.CDLL(library), Nccl(library)

    def _missing(self, pool: Pool) -> None:
        return None

    def _carrier(self, pool: Pool) -> Carrier:
        return NcclCarrier(self._nccl, lambda: HostStream(self.library), self._timeout_s)
