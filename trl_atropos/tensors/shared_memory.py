"""Shares one storage between two processes. The owner exports it as a JSON handle, and the other
process opens the handle as a flat `uint8` tensor over the same memory.

- CPU: an anonymous memory file (`memfd_create`). It leaves no name behind, and is not bounded by
  the size of `/dev/shm`. A thread of the owner (`Doorkeeper`) passes its descriptor to those who
  know the handle's key. The other way, `/proc/<pid>/fd`, is closed to others if the owner has
  closed itself (`trl_atropos.privacy`).
- CUDA: the IPC handle that `torch.multiprocessing` makes of the allocation.

Nothing is pickled. A handle gives access to the weights: it must not be logged or written to disk.
"""

import base64
import hmac
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from functools import cache

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

FILE_NAME = "trl_atropos_weights"
KEY_BYTES = 32  # of a handle's key, which is twice as many characters
DEADLINE = 10.0  # seconds in which the two sides of a socket exchange key and descriptor
CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a socket

# File descriptor and bytes of this process's own arenas, by their data pointer
_arenas: dict[int, tuple[int, int]] = {}


class Doorkeeper:
    """
    Passes descriptors of this process to processes that know their keys, from a thread of its own.

    It listens at a Unix socket without a file, whose name everybody on the machine can read. The
    key is the secret: it is part of a handle, which travels with the control token.

    Attributes:
        address: Name of the socket, without the zero byte that it begins with.
    """

    def __init__(self) -> None:
        self.address = f"{FILE_NAME}-{secrets.token_hex(8)}"
        self._keys: dict[int, str] = {}  # by descriptor
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        threading.Thread(target=self._serve, name="doorkeeper", daemon=True).start()

    def key_of(self, descriptor: int) -> str:
        """Returns the key of a descriptor, which must stay open."""
        return self._keys.setdefault(descriptor, secrets.token_hex(KEY_BYTES))

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(DEADLINE)
                with suppress(OSError):  # it has left, or sends nothing
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """Passes the descriptor whose key comes through a connection, or nothing if it is no
        key."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        _pid, user, _group = CREDENTIALS.unpack(credentials)
        if user not in (0, os.geteuid()):
            return
        given = connection.recv(2 * KEY_BYTES)
        for descriptor, key in list(self._keys.items()):
            if hmac.compare_digest(key.encode(), given):
                socket.send_fds(connection, [b"1"], [descriptor])


@cache
def _doorkeeper(pid: int) -> Doorkeeper:
    """Returns the one of this process, whose id is `pid`: a fork has no threads of its parent."""
    return Doorkeeper()


def allocate_arena(num_bytes: int) -> torch.Tensor:
    """Allocates shared memory on the CPU. Returns a flat `uint8` tensor of `num_bytes`."""
    descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    path = f"/proc/self/fd/{descriptor}"
    arena = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    _arenas[arena.data_ptr()] = (descriptor, num_bytes)
    return arena


def export_storage(storage: torch.UntypedStorage) -> dict:
    """Makes the JSON handle of a storage, which must outlive every process that opens it."""
    if storage.device.type == "cpu":
        if storage.data_ptr() not in _arenas:
            raise ValueError("only memory of `allocate_arena` can be shared on the CPU")
        descriptor, num_bytes = _arenas[storage.data_ptr()]
        doorkeeper = _doorkeeper(os.getpid())
        return {
            "kind": "memfd",
            "socket": doorkeeper.address,
            "key": doorkeeper.key_of(descriptor),
            "num_bytes": num_bytes,
            # for versions of this package that know no socket
            "pid": os.getpid(),
            "descriptor": descriptor,
        }
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    # Each attach needs a new export: it holds one reference count, which the process that opens it
    # releases.
    _, arguments = reduce_tensor(flat)
    *_of_tensor, device, handle, num_bytes, offset, _, counter, counter_offset, event, sync = (
        arguments
    )
    allocation = [handle, num_bytes, offset, False, counter, counter_offset, event, bool(sync)]
    return {
        "kind": "cuda_ipc",
        "device_uuid": str(torch.cuda.get_device_properties(device).uuid),
        "num_bytes": num_bytes,
        "allocation": [_encoded(part) for part in allocation],
    }


def open_storage(handle: dict) -> torch.Tensor:
    """Opens another process's storage as a flat `uint8` tensor on the same device."""
    num_bytes = int(handle["num_bytes"])
    if handle["kind"] == "memfd":
        if "socket" not in handle:  # of a version that knows none
            pid = int(handle["pid"])
            descriptor = int(handle["descriptor"])
            return _open_arena(f"/proc/{pid}/fd/{descriptor}", num_bytes)
        descriptor = _received(handle["socket"], handle["key"])
        try:
            return _open_arena(f"/proc/self/fd/{descriptor}", num_bytes)
        finally:
            os.close(descriptor)  # the memory stays mapped
    allocation = [_decoded(part) for part in handle["allocation"]]
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([num_bytes]),
        (1,),  # stride
        0,  # offset
        torch.storage.TypedStorage,
        torch.uint8,
        _device_index(handle["device_uuid"]),
        *allocation,
    )


def _received(address: str, key: str) -> int:
    """Returns the descriptor that the owner's `Doorkeeper` passes for a key. Raises `ValueError` if
    there is none."""
    descriptors: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(DEADLINE)
        with suppress(ConnectionError, TimeoutError):
            connection.connect(f"\0{address}")
            connection.sendall(key.encode())
            connection.shutdown(socket.SHUT_WR)  # the owner does not wait for the rest of a key
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ValueError(
            f"the owner of shared weights passes none to this process at the socket {address}: it "
            "has ended, runs as another user, or has another network namespace. Run trainer and "
            "server as one user in one container"
        )
    return descriptors[0]


def _open_arena(path: str, num_bytes: int) -> torch.Tensor:
    # torch.from_file would grow a file that is too small, so its size is checked first.
    target = os.readlink(path)
    size = os.stat(path).st_size
    if not target.startswith(f"/memfd:{FILE_NAME}") or size != num_bytes:
        raise ValueError(f"{path} is not the server's weight memory of {num_bytes} bytes")
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _encoded(part: object) -> object:
    """Returns a part of a CUDA handle as JSON has it: bytes as base64, others as they are."""
    if isinstance(part, bytes):
        return base64.b64encode(part).decode()
    return part


def _decoded(part: object) -> object:
    if isinstance(part, str):
        return base64.b64decode(part)
    return part


def _device_index(uuid: str) -> int:
    """Finds a GPU in this process, whose numbering may differ from the server's
    (`CUDA_VISIBLE_DEVICES`)."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(
        f"the server's weights are on GPU {uuid}, which this process does not see: give both "
        "processes the same CUDA_VISIBLE_DEVICES"
    )


def pointer_of(tensor: torch.Tensor) -> int:
    """Returns the data pointer of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
