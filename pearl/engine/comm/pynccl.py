"""A small binding of NCCL for groups outside of any WORLD, whose members may be lost: each call has a deadline, and `abort`.

Owns the calls of libnccl and the translation of its results. It does not know who is in a group: the unique id is made by one
member and brought to the others by whoever knows them. Invariants: nothing is loaded before it is asked for; no call waits
without a limit, since communicators are non-blocking (NCCL 2.14 and later); after an error a communicator is aborted, and
refuses everything.

Signatures, values and the layout of ncclConfig_t (that of 2.17, which later libraries take by its size and version) follow
NVIDIA's nccl.h. They are tested against a library of the same prototypes; nothing here has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from pearl.engine.comm.communicator import CollectiveError

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
UNDEFINED = -(1 << 31)
MAGIC, CONFIG_VERSION = 0xCAFEBEEF, 21700
OLDEST = 21403
"""Non-blocking communicators came with 2.14.3."""
SUM = 0
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
POLL_S = 0.0005
LIBRARY = "libnccl.so.2"


class NcclUnavailable(RuntimeError):
    """There is no NCCL that can be used here; the message says why."""


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
    ]


SIGNATURES: dict[str, list] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommFinalize": [c_void_p],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
}
"""Arguments of what is called; each returns an ncclResult_t."""


class Nccl:
    """The library. NcclUnavailable if there is none, or it is too old."""

    def __init__(self, path: str | None = None) -> None:
        """`path`: of the library; by default that of NVIDIA's wheel, which torch uses too, or of the system."""
        self.path = path or _wheel_library() or LIBRARY
        try:
            self._library = ctypes.CDLL(self.path)
        except OSError as error:
            raise NcclUnavailable(f"NCCL cannot be loaded from {self.path}: {error}") from error
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise NcclUnavailable(f"NCCL at {self.path} has no {name}; {OLDEST} or later is needed")
            function.argtypes, function.restype = arguments, c_int
        self._library.ncclGetErrorString.argtypes, self._library.ncclGetErrorString.restype = [c_int], c_char_p
        number = c_int()
        self.check(self.call("ncclGetVersion", byref(number)), "ncclGetVersion")
        self.version = number.value
        if self.version < OLDEST:
            raise NcclUnavailable(f"NCCL at {self.path} is version {self.version}, {OLDEST} or later is needed")

    def unique_id(self) -> bytes:
        """What all members of a new group have to be given."""
        made = UniqueId()
        self.check(self.call("ncclGetUniqueId", byref(made)), "ncclGetUniqueId")
        return bytes(ctypes.string_at(byref(made), UNIQUE_ID_BYTES))

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def check(self, result: int, what: str) -> None:
        """CollectiveError for anything but success."""
        if result != SUCCESS:
            words = self._library.ncclGetErrorString(result)
            raise CollectiveError(f"{what}: {words.decode() if words else 'error'} ({result})")


class NcclComm:
    """One member's communicator, on the current device. Calls enqueue on `stream` (a cudaStream_t) and return.

    CollectiveError, after which the communicator is aborted, for what NCCL refuses and for what it has not enqueued within
    `timeout_s`. Whether the work itself ends is the stream's to say; if it does not, `abort` ends it.
    """

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, size: int, timeout_s: float) -> None:
        """Returns once all members have come."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"unique_id: has {len(unique_id)} bytes, must be {UNIQUE_ID_BYTES}")
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank}: must be 0 to {size - 1}")
        self.rank, self.size = rank, size
        self._nccl, self._timeout_s = nccl, timeout_s
        self._handle: c_void_p | None = c_void_p()
        config = Config(ctypes.sizeof(Config), MAGIC, CONFIG_VERSION, 0, UNDEFINED, UNDEFINED, UNDEFINED, None)
        identity = UniqueId.from_buffer_copy(unique_id)
        arguments = (byref(self._handle), size, identity, rank, byref(config))
        self._wait(nccl.call("ncclCommInitRankConfig", *arguments), f"a group of {size}, member {rank}")

    def send(self, tensor: Tensor, peer: int, stream: int) -> None:
        self._run("ncclSend", peer, tensor.data_ptr(), tensor.numel(), _dtype(tensor), peer, stream=stream)

    def recv(self, tensor: Tensor, peer: int, stream: int) -> None:
        self._run("ncclRecv", peer, tensor.data_ptr(), tensor.numel(), _dtype(tensor), peer, stream=stream)

    def broadcast(self, tensor: Tensor, src: int, stream: int) -> None:
        """Copies member `src`'s tensor, in place."""
        place = tensor.data_ptr()
        self._run("ncclBroadcast", src, place, place, tensor.numel(), _dtype(tensor), src, stream=stream)

    def all_reduce_sum(self, tensor: Tensor, stream: int) -> None:
        """The sum over all members, in place."""
        place = tensor.data_ptr()
        self._run("ncclAllReduce", self.rank, place, place, tensor.numel(), _dtype(tensor), SUM, stream=stream)

    def group_start(self) -> None:
        """Calls from here to `group_end` are made together: several sends and receives that depend on each other."""
        self._nccl.check(self._nccl.call("ncclGroupStart"), "ncclGroupStart")

    def group_end(self) -> None:
        self._wait(self._nccl.call("ncclGroupEnd"), "ncclGroupEnd")

    def abort(self) -> None:
        """Ends whatever is under way on this member, and the communicator."""
        handle, self._handle = self._handle, None
        if handle:
            self._nccl.call("ncclCommAbort", handle)

    def destroy(self) -> None:
        """Leaves the group once all that was enqueued is through; aborts it if that takes longer than the timeout."""
        handle = self._alive("destroy")
        self._wait(self._nccl.call("ncclCommFinalize", handle), "ncclCommFinalize")
        self._handle = None
        self._nccl.check(self._nccl.call("ncclCommDestroy", handle), "ncclCommDestroy")

    def _run(self, name: str, member: int, *arguments: int, stream: int) -> None:
        handle = self._alive(name)
        if not 0 <= member < self.size:
            raise ValueError(f"{name}: member {member}, must be 0 to {self.size - 1}")
        self._wait(self._nccl.call(name, *arguments, handle, stream), name)

    def _wait(self, result: int, what: str) -> None:
        """Until what was begun is enqueued."""
        deadline = time.monotonic() + self._timeout_s
        state = c_int(result)
        while state.value == IN_PROGRESS:
            if time.monotonic() > deadline:
                self.abort()
                raise CollectiveError(f"{what}: not through within {self._timeout_s:g} s")
            time.sleep(POLL_S)
            self._nccl.check(self._nccl.call("ncclCommGetAsyncError", self._handle, byref(state)), what)
        if state.value != SUCCESS:
            self.abort()
            self._nccl.check(state.value, what)

    def _alive(self, what: str) -> c_void_p:
        if not self._handle:
            raise CollectiveError(f"{what}: this communicator was left or aborted")
        return self._handle


def _dtype(tensor: Tensor) -> int:
    if tensor.dtype not in DTYPES or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of {tensor.dtype}, strides {tensor.stride()}: must be contiguous, of {', '.join(map(str, DTYPES))}"
        )
    return DTYPES[tensor.dtype]


def _wheel_library() -> str | None:
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = found.submodule_search_locations if found is not None else None
    places = [Path(folder) / "lib" / LIBRARY for folder in folders or ()]
    return next((str(place) for place in places if place.is_file()), None)
