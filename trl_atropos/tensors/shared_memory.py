"""One storage in two processes: the handle that crosses the wire, and the bytes behind it.

The process that owns a storage exports it as a JSON handle. The other opens it as a flat `uint8` tensor over the same
memory. What differs between devices:

- CPU: an anonymous memory file (`memfd_create`), opened through `/proc/<pid>/fd`. It leaves no name behind, is not
  bounded by the size of `/dev/shm`, and is open only to processes of the same user on the same machine.
- CUDA: the IPC handle of the allocation, as `torch.multiprocessing.reductions.reduce_tensor` takes it, in base64.

Nothing is pickled. A handle is a capability to the weights: it must not be logged or written to disk.
"""

import base64
import os

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_arenas: dict[int, tuple[int, int]] = {}  # data pointer -> (file descriptor, bytes), of this process's own arenas


def allocate_arena(num_bytes: int) -> torch.Tensor:
    """Allocates shared memory on the CPU. Returns a flat `uint8` tensor of `num_bytes`."""
    descriptor = os.memfd_create("trl_atropos_weights", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    arena = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
    _arenas[arena.data_ptr()] = (descriptor, num_bytes)
    return arena


def allocate_shared(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of `num_bytes` that `export_storage` can hand to another process, as a flat `uint8` tensor."""
    if device.type == "cpu":
        return allocate_arena(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def export_storage(storage: torch.UntypedStorage) -> dict:
    """The JSON handle of a storage of this process. The storage must outlive every process that opens it."""
    if storage.device.type == "cpu":
        if storage.data_ptr() not in _arenas:
            raise ValueError("only memory of `allocate_arena` can be shared on the CPU")
        descriptor, num_bytes = _arenas[storage.data_ptr()]
        return {"kind": "memfd", "pid": os.getpid(), "descriptor": descriptor, "num_bytes": num_bytes}
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    # A fresh handle for every attach: each export holds one reference count that one importer releases.
    _, arguments = reduce_tensor(flat)
    device, handle, _, storage_offset, _, ref_handle, ref_offset, event_handle, event_sync = arguments[6:]
    return {
        "kind": "cuda_ipc",
        "device_uuid": str(torch.cuda.get_device_properties(device).uuid),
        "num_bytes": storage.nbytes(),
        "handle": base64.b64encode(handle).decode(),
        "storage_offset": storage_offset,
        "ref_handle": base64.b64encode(ref_handle).decode(),
        "ref_offset": ref_offset,
        "event_handle": base64.b64encode(event_handle).decode(),
        "event_sync": bool(event_sync),
    }


def open_storage(handle: dict) -> torch.Tensor:
    """Opens another process's storage. Returns a flat `uint8` tensor over the same memory, on the same device."""
    num_bytes = int(handle["num_bytes"])
    if handle["kind"] == "memfd":
        path = f"/proc/{int(handle['pid'])}/fd/{int(handle['descriptor'])}"
        # torch.from_file would grow a file that is too small, so the size is checked first.
        if not os.readlink(path).startswith("/memfd:trl_atropos_weights") or os.stat(path).st_size != num_bytes:
            raise ValueError(f"{path} is not the server's weight memory of {num_bytes} bytes")
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    if handle["kind"] != "cuda_ipc":
        raise ValueError(f"unknown kind of memory handle: {handle['kind']!r}")
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([num_bytes]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        _device_index(handle["device_uuid"]),
        base64.b64decode(handle["handle"]),
        num_bytes,
        int(handle["storage_offset"]),
        False,
        base64.b64decode(handle["ref_handle"]),
        int(handle["ref_offset"]),
        base64.b64decode(handle["event_handle"]),
        bool(handle["event_sync"]),
    )


def _device_index(uuid: str) -> int:
    """Index of a GPU in this process, whose numbering may differ from the server's (`CUDA_VISIBLE_DEVICES`)."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(
        f"the server's weights are on GPU {uuid}, which this process does not see: give both processes the same "
        "CUDA_VISIBLE_DEVICES"
    )
