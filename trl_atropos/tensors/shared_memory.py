"""Shares one storage between two processes. The owner exports it as a JSON handle, and the other
process opens the handle as a flat `uint8` tensor over the same memory.

- CPU: an anonymous memory file (`memfd_create`), opened through `/proc/<pid>/fd`. It leaves no name
  behind, is not bounded by the size of `/dev/shm`, and only processes of the same user on the same
  machine can open it.
- CUDA: the IPC handle that `torch.multiprocessing` makes of the allocation.

Nothing is pickled. A handle gives access to the weights: it must not be logged or written to disk.
"""

import base64
import os

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

FILE_NAME = "trl_atropos_weights"

# File descriptor and bytes of this process's own arenas, by their data pointer
_arenas: dict[int, tuple[int, int]] = {}


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
        return {
            "kind": "memfd",
            "pid": os.getpid(),
            "descriptor": descriptor,
            "num_bytes": num_bytes,
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
        pid = int(handle["pid"])
        descriptor = int(handle["descriptor"])
        return _open_arena(pid, descriptor, num_bytes)
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


def _open_arena(pid: int, descriptor: int, num_bytes: int) -> torch.Tensor:
    path = f"/proc/{pid}/fd/{descriptor}"
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
