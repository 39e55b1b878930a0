"""Faults inside a server are not taken for rounding, and a healthy run beside them goes on."""

import json
import os
from pathlib import Path

import pytest

from tests.forge import SERVER
from tests.weights.architectures import ENVIRONMENT
from tests.weights.planted import BIAS, REPLACED

pytestmark = pytest.mark.slow(60)

STOPPED = {
    ("server", "a parameter is replaced"): ("FingerprintError", REPLACED),
    ("server", "an attention scale is doubled"): (
        "FingerprintError",
        "model.layers.1.self_attn.attn.impl.scale",
    ),
    ("server", "a rotary table is off by one"): (
        "FingerprintError",
        "self_attn.rotary_emb.cos_sin_cache",
    ),
    ("server", "a kernel computes something else"): ("ProbeError", "More than 0.1 is no rounding"),
    ("colocate", "a parameter is replaced"): ("FingerprintError", REPLACED),
}


def plant(folder: Path, family: str, dtype: str) -> dict[str, dict[str, str]]:
    log = folder / "log"
    command = ["-m", "tests.weights.planted", family, dtype]
    process = SERVER.fork(command, os.environ | ENVIRONMENT, log)
    assert process.wait(600) == 0, log.read_text()[-3000:]
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, str]]:
    return plant(tmp_path_factory.mktemp("planted"), "Qwen3", "bfloat16")


@pytest.mark.parametrize(("mode", "fault"), STOPPED)
def test_fault_inside_server_stops_run_and_is_named(found, mode, fault):
    kind, name = STOPPED[mode, fault]
    assert found[mode][fault].startswith(kind) and name in found[mode][fault]


@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_healthy_bfloat16_run_goes_on_beside_faults(found, mode):
    healthy = {name: told for name, told in found[mode].items() if name.startswith("nothing")}
    assert len(healthy) > 6 and set(healthy.values()) == {""}, healthy
    assert found[mode]["limit"] == "0.1" and found[mode]["complete"] == "True"


def test_checkpoint_buffer_is_compared_too(tmp_path):
    found = plant(tmp_path, "GLM-4-MoE", "float32")["server"]
    healthy = {name: told for name, told in found.items() if name.startswith("nothing")}
    assert set(healthy.values()) == {""} and found["complete"] == "True"
    assert found["a router's bias is another"].startswith("FingerprintError")
    assert BIAS in found["a router's bias is another"]
