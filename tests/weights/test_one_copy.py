"""The pair of server and trainer holds the weights once: measured from the kernel's own accounts of
both processes."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

from recipes.quickstart.make_model import make_model
from tests.server_process import running_server
from tests.weights.trainers import make_publisher
from trl_atropos import AtroposGRPOConfig

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="reads the kernel's accounts of memory on the CPU"
    ),
]

MAPPING = "memfd:trl_atropos_weights"


def accounts(pid: int) -> dict[str, int]:
    """Bytes of the shared weights (`shared_rss`, `shared_pss`), and private bytes of everything
    else."""
    totals, shared = {"shared_rss": 0, "shared_pss": 0, "private": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            shared = MAPPING in line
            continue
        if shared and first in ("Rss:", "Pss:"):
            totals[f"shared_{first[:3].lower()}"] += int(rest.split()[0]) * 1024
        if not shared and first in ("Private_Dirty:", "Private_Clean:"):
            totals["private"] += int(rest.split()[0]) * 1024
    return totals


def settle() -> None:
    """Gives freed memory back to the system, so that it is not counted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> tuple[str, int]:
    """A model of at least 100 MB, and its size in bytes."""
    folder = tmp_path_factory.mktemp("large_model")
    make_model(
        str(folder),
        0,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=3,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
    )
    return str(folder), (folder / "model.safetensors").stat().st_size


def test_server_and_trainer_hold_weights_once(server, large_model, tmp_path):
    folder, size = large_model
    assert size >= 100e6
    args = AtroposGRPOConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True)
    small = accounts(server.engine.pid)["private"]  # what an engine needs besides its weights
    with running_server(folder, tmp_path / "logs") as large:
        settle()
        private_before = accounts(os.getpid())["private"]
        publisher = make_publisher(large, tmp_path, timeout=60)
        model = publisher.load(folder, args)
        settle()
        trainer, sampler = accounts(os.getpid()), accounts(large.engine.pid)
        with torch.no_grad():  # every page is really there, and really the same on both sides
            total = sum(parameter.double().sum() for parameter in model.parameters())
        assert torch.isfinite(total)
        publisher.close()
    assert trainer["shared_rss"] == pytest.approx(size, rel=0.1)
    assert sampler["shared_rss"] == pytest.approx(size, rel=0.1)
    pair = trainer["shared_pss"] + sampler["shared_pss"]
    private = max(0, trainer["private"] - private_before) + max(0, sampler["private"] - small)
    print(
        f"weights {size / 1e6:.1f} MB: shared by the pair {pair / 1e6:.1f} MB, private "
        f"{private / 1e6:.1f} MB more"
    )
    assert pair + private == pytest.approx(size, rel=0.1)
