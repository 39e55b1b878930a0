"""Copies of many tensors: those that a GPU's kernel makes are torch's own, and the others are left
to torch."""

import os
import subprocess
import sys

import pytest
import torch

from trl_atropos.tensors.channel import Copies, runs_of

KERNEL = """
import numpy, torch
from trl_atropos.tensors import channel as copies

def pair(size, of=None, to=None, dtype=torch.bfloat16):
    "`of` and `to`: how a larger tensor is cut, where the source and the target are no whole ones."
    cut = lambda how: torch.zeros(size, dtype=dtype) if how is None else how(torch.zeros(3000, 3000, dtype=dtype))
    target, source = cut(to), cut(of)
    return target, source.copy_(torch.randn(source.shape))

pairs = [
    pair((128,)), pair((8,)),  # a head's norm, and as little as is moved at a time
    pair((40, 512)), pair((70_000,), dtype=torch.float32), pair((1, 3, 1, 1024)), pair((2, 256), dtype=torch.float64),
    pair((0,), lambda t: t[8:600, :1024], lambda t: t[700:1292, 1024:2048]),  # columns of a matrix, as shards are
    pair((0,), lambda t: t[8:11, :1024], lambda t: t[:2304:768, 16:1040]),
]
tables = [copies.runs_of(*one) for one in pairs]
table = torch.from_numpy(numpy.concatenate(tables))
copies._copy_runs[(len(table),)](table, copies.MOST_WORDS, copies.WORDS_AT_ONCE)
for target, source in pairs:
    assert torch.equal(target, source) and target.abs().sum() > 0, target.shape
    target.zero_()
assert not any(target._base.any() for target, _ in pairs[6:])  # nothing was written beside
"""


def test_gpu_kernel_copies_like_torch():
    """Triton's interpreter runs it on the CPU."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "source"),
    {
        "a conversion": (torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(4096)),
        "short runs": (torch.zeros(64, 8), torch.zeros(64, 16)[:, :8]),
        "another order": (torch.zeros(1024, 1024), torch.zeros(1024, 1024).t()),
        "an odd address": (torch.zeros(4096)[1:], torch.zeros(4095)),
        "bytes beside 16": (torch.zeros(1025), torch.zeros(1025)),
        "nothing": (torch.zeros(0, 4), torch.zeros(0, 4)),
        "another device": (torch.zeros(4096), torch.zeros(4096, device="meta")),
    }.values(),
)
def test_unsupported_copy_is_left_to_torch(target, source):
    assert runs_of(target, source) is None


def test_copies_are_made_anew_each_time():
    sources = [torch.randn(300, 40), torch.randn(7).double(), torch.randn(8, 8).t()]
    targets = [torch.zeros(300, 40), torch.zeros(7), torch.zeros(8, 8)]
    copies = Copies(zip(targets, sources))
    for _ in range(2):
        torch._foreach_add_(sources, 1)
        copies()
        assert all(
            torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources)
        )
    Copies([])()
