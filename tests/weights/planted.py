"""Faults inside a vLLM engine that leave the weights that are published as they are.

python -m tests.weights.planted FAMILY DTYPE

Plants each fault in one engine of this process, as our server starts it, and prints by name what
stopped the run, as JSON. `test_planted.py` runs it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.weights.architectures import ENVIRONMENT, FAMILIES, make_model, record

HEALTHY = 6  # publishes without a fault
REPLACED = "model.layers.0.mlp.down_proj.weight"
# a parameter in vLLM, a buffer in Transformers
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"

Undo = Callable[[], object]


def replace_parameter(model, name: str = REPLACED, factor: float = 1.0, added: float = 0.0) -> Undo:
    """Another one takes its place, and publishes go on writing to the old one."""
    import torch

    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    old = getattr(layer, leaf)
    new = torch.nn.Parameter(old.detach() * factor + added, requires_grad=False)
    vars(new).update(vars(old))  # vLLM's loader is an attribute
    setattr(layer, leaf, new)
    return lambda: setattr(layer, leaf, old)


def replace_and_scale(model) -> Undo:
    return replace_parameter(model, factor=300)


def replace_bias(model) -> Undo:
    return replace_parameter(model, BIAS, added=0.25)


def double_attention_scale(model) -> Undo:
    implementation = model.get_submodule("model.layers.1.self_attn.attn").impl
    scale = implementation.scale
    implementation.scale = 2 * scale
    return lambda: setattr(implementation, "scale", scale)


def shift_rotary_table(model) -> Undo:
    table = model.get_submodule("model.layers.0.self_attn.rotary_emb").cos_sin_cache
    values = table.clone()
    table.copy_(values.roll(1, 0))
    return lambda: table.copy_(values)


def scale_hidden_states(model) -> Undo:
    """As a kernel would that computes something else: no weight, number or table of the model shows
    it."""
    hook = model.get_submodule("model.layers.0.mlp").register_forward_hook(
        lambda *given: 300 * given[-1]
    )
    return hook.remove


FAULTS = {
    "Qwen3": {
        # The weights are compared as training begins, and after that only where a probe is beyond
        # its tolerance. This mode comes first: it asks for a server with the weights of the
        # checkpoint.
        "colocate": {"a parameter is replaced": replace_and_scale},
        "server": {
            "a parameter is replaced": replace_parameter,
            "an attention scale is doubled": double_attention_scale,
            "a rotary table is off by one": shift_rotary_table,
            "a kernel computes something else": scale_hidden_states,
        },
    },
    "GLM-4-MoE": {"server": {"a router's bias is another": replace_bias}},
}


def main(family: str, dtype: str) -> None:
    os.environ.update(ENVIRONMENT)
    from tests.weights.engine import Engine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(FAMILIES[family], folder / "model", dtype)
        engine = Engine(folder / "model", dtype)
        recording = record(folder / "rollouts.jsonl")
        found = {
            mode: stopped(engine, mode, faults, folder, recording)
            for mode, faults in FAULTS[family].items()
        }
    print("found " + json.dumps(found))


def stopped(engine, mode: str, faults: dict, folder: Path, recording: str) -> dict[str, str]:
    """What stopped a run of this mode, by fault; "" where nothing did."""
    from vllm.config import set_current_vllm_config

    from tests.weights.live import disturb, publish
    from tests.weights.trainers import make_trainer
    from trl_atropos.errors import FingerprintError, ProbeError
    from trl_atropos.server_client import Servers
    from trl_atropos.weights.publisher import ServerPublisher, transfer_of

    transfer = transfer_of(mode, Servers([engine.url], 60, client=engine), "auto", str(folder))
    publisher = ServerPublisher(transfer, probe_every_n_steps=1)
    with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
        init = {
            "model_init_kwargs": {
                "dtype": str(engine.llm.model_config.dtype).removeprefix("torch.")
            }
        }
        trainer = make_trainer(
            publisher, recording, str(folder / "model"), folder / mode, mode, **init
        )

        def publish_next() -> str:
            try:
                publish(trainer, lambda: disturb(trainer.model, 1e-3))
                publisher.judge_last_publish()
            except (FingerprintError, ProbeError) as error:
                return f"{type(error).__name__}: {error}"
            return ""

        publisher.hold()
        found = {f"nothing, publish {number}": publish_next() for number in range(HEALTHY)}
        found["limit"] = f"{publisher._probe.limit}"
        found["complete"] = f"{publisher._proof.compare_all_anew()}"
        for name, plant in faults.items():
            (undo,) = engine.llm.apply_model(plant)
            found[name] = publish_next()
            undo()
            found[f"nothing, after {name}"] = publish_next()
        publisher.close()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
