"""The modes that one GPU allows, with models of real shapes in bfloat16 (`make test-gpu`).

Random weights make every token cost 12 nats, which is where two kernels differ most.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks.models import PRESETS
from tests.server_process import running_server
from tests.weights.live import act_as, publish
from tests.weights.trainers import make_publisher, make_trainer
from tests.weights.watched import sample, score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALLOWED = {"0.6B": (0.2, 3e-2), "8B": (0.6, 0.15)}  # nats: largest and mean
MODES = {
    "colocate": ("colocate", "auto", False, "Colocate"),
    "copy on the device": ("server", "memory", False, "FullWeights"),
    "copy over NCCL": ("server", "nccl", False, "FullWeights"),
    "colocate, asleep": ("colocate", "auto", False, "FullWeights"),
    "colocate with an adapter": ("colocate", "auto", True, "MemoryLora"),
    "nccl_lora over NCCL": ("nccl_lora", "nccl", True, "MemoryLora"),
    "nccl_lora on the device": ("nccl_lora", "memory", True, "MemoryLora"),
    "lora": ("lora", "auto", True, "FileLora"),
}


@pytest.fixture(scope="session")
def models(server_model, tmp_path_factory):
    """Makes a folder with a random model of a size, once."""
    made: dict[str, str] = {}

    def make(size: str) -> str:
        if size not in made:
            folder = tmp_path_factory.mktemp(size)
            config = Qwen3Config(**PRESETS[size], max_position_embeddings=4096, dtype="bfloat16")
            torch.manual_seed(0)
            with torch.device("cuda"):
                Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
            AutoTokenizer.from_pretrained(server_model).save_pretrained(folder)
            torch.cuda.empty_cache()
            made[size] = str(folder)
        return made[size]

    return make


@contextmanager
def trainer_and_server(
    name: str, model: str, recording: str, folder: Path, graphs: bool = False, **settings
) -> Iterator[tuple]:
    """`graphs`: with compiled kernels and CUDA graphs, which take a minute to make and keep the
    weights' addresses."""
    mode, transport, adapter, transfer = MODES[name]
    flags = ["--vllm_mode", mode, "--dtype", "bfloat16", "--gpu-memory-utilization", "0.25"]
    # stated: vLLM cannot measure what others use meanwhile
    flags += ["--kv-cache-memory-bytes", str(4 << 30)]
    flags += [] if graphs else ["--enforce-eager"]
    flags += ["--numerics", settings.get("numerics", "default")]
    flags += ["--enable-lora"] if adapter else []
    flags += ["--enable-sleep-mode"] if "asleep" in name else []
    act_as("server")
    with running_server(model, folder / "logs", *flags) as server:
        act_as("trainer")
        sleep = {"sleep_level": 2} if "asleep" in name else {}
        publisher = make_publisher(server, folder, mode, transport, timeout=120, **sleep)
        config = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear") if adapter else None
        init = {"model_init_kwargs": {"dtype": "bfloat16"}}
        trainer = make_trainer(
            publisher, recording, model, folder, mode, config, **init, **settings
        )
        assert type(publisher.transfer).__name__ == transfer
        try:
            yield trainer, server
        finally:
            publisher.close()
            trainer.model = trainer.model_wrapped = None
            torch.cuda.empty_cache()


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("size", ALLOWED)
def test_server_samples_from_published_weights(models, recording, tmp_path, size, name):
    """After every publish, 32 random sequences agree, some longer than two KV blocks; the last
    version's do not."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1000, (3 + 2 * i,), generator=generator).tolist() for i in range(32)]
    graphs = name in ("colocate", "nccl_lora on the device")
    with trainer_and_server(name, models(size), recording, tmp_path, graphs) as (trainer, server):
        publisher, model = trainer.policy_publisher, trainer.model
        publisher.hold()
        publish(trainer, lambda: None)  # the weights that the trainer has loaded
        chosen = {
            key: p for key, p in model.named_parameters() if "layers.0." in key and p.requires_grad
        }
        for version in range(2, 5):
            before = {key: parameter.detach().clone() for key, parameter in chosen.items()}
            publisher.let_servers_sleep()
            publish(trainer, lambda: _disturb(chosen, 0.05 if MODES[name][2] else 0.02))
            samples = [sample(server, prompt, 8) for prompt in prompts]
            assert {(row.begun, row.ended) for row in samples} == {(version, version)}
            sampled = torch.cat([row.logprobs for row in samples])
            error = (sampled - torch.cat(score(model, {}, samples))).abs()
            change = (sampled - torch.cat(score(model, before, samples))).abs()
            print(
                f"{size} {name}: max {error.max():.3f} mean {error.mean():.4f} (before: mean "
                f"{change.mean():.3f})"
            )
            assert error.max() <= ALLOWED[size][0] and error.mean() <= ALLOWED[size][1]
            assert change.mean() > 3 * error.mean()


@pytest.mark.parametrize("name", MODES)
def test_training_keeps_server_and_trainer_equal(models, recording, tmp_path, name):
    """Real optimizer steps, with float32 masters where weights are trained, and a probe after
    each."""
    settings = {"max_steps": 4, "learning_rate": 1e-5}
    with trainer_and_server(name, models("0.6B"), recording, tmp_path, **settings) as (trainer, _):
        trainer.train()
        assert trainer.policy_publisher.policy_version == 4
        assert 0 < trainer.policy_publisher.probe_max_abs_diff <= ALLOWED["0.6B"][0]


def test_bitwise_server_and_trainer_agree_exactly(models, recording, tmp_path):
    """The probe, after each of these steps, allows nothing else."""
    settings = {"max_steps": 4, "learning_rate": 1e-5, "numerics": "bitwise"}
    with trainer_and_server("colocate", models("0.6B"), recording, tmp_path, True, **settings) as (
        trainer,
        _,
    ):
        trainer.train()
        assert trainer.policy_publisher.policy_version == 4
        assert trainer.policy_publisher.probe_max_abs_diff == 0


@torch.no_grad()
def _disturb(parameters: dict[str, torch.Tensor], scale: float) -> None:
    for parameter in parameters.values():
        parameter.add_(scale * torch.randn_like(parameter))
