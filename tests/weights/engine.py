"""A whole vLLM engine inside this process, as our server starts it, that a trainer of this process
publishes to.

Worker extension and loader are the server's own; only HTTP is left out. Judged by what it computes.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

from trl_atropos.protocol import (
    PROTOCOL_VERSION,
    Attachment,
    FingerprintsReply,
    ParameterSpec,
    ServerInfo,
    machine_id,
)
from trl_atropos.server import compat
from trl_atropos.server.launch import CPU_REQUIRED, REQUIRED
from trl_atropos.tensors.fingerprint import Assembly

# vLLM looks at each class of models in a process of its own first, which imports all of vLLM once
# more.
registry._run_in_subprocess = lambda look: look()

PROMPTS = torch.randint(256, (3, 48), generator=torch.Generator().manual_seed(0)).tolist()
MAX_MODEL_LEN = 256


class Engine:
    """One per process: vLLM keeps global state. Stands in for `ServerClient` where a publisher
    makes its clients."""

    url, host = "this process", "127.0.0.1"

    def __init__(self, folder: Path, dtype: str):
        self.policy_version = 0
        self.llm = LLM(
            str(folder),
            dtype=dtype,
            distributed_executor_backend="uni",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            num_gpu_blocks_override=64,  # or the whole of the space for the cache is written once
            disable_log_stats=True,
            **{
                flag.removeprefix("--").replace("-", "_"): value
                for flag, value in (REQUIRED | CPU_REQUIRED).items()
            },
        )

    def __call__(self, *_) -> "Engine":
        """As the class of a client: any URL is this engine."""
        return self

    def difference(self, reference: PreTrainedModel) -> tuple[float, float]:
        """Largest and mean difference between the prompts' log-probabilities here and in
        `reference`, in nats."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False
        )
        differences = []
        was_training = reference.training
        reference.eval()
        for ids, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits
            expected = logits[0, :-1].float().log_softmax(-1)
            for position, (token, given) in enumerate(
                zip(ids[1:], output.prompt_logprobs[1:], strict=True)
            ):
                differences.append(abs(given[token].logprob - expected[position, token].item()))
        reference.train(was_training)
        return max(differences), sum(differences) / len(differences)

    # ---------------------------------------------------- what a publisher asks of a `ServerClient`

    def info(self) -> ServerInfo:
        worker, model = self._worker("describe"), self.llm.model_config
        del worker["device_uuid"]
        return ServerInfo(
            **worker,
            device_uuids=[],
            protocol=PROTOCOL_VERSION,
            instance="the only one",
            machine=machine_id(),
            vllm_version=str(compat.VLLM_VERSION),
            model=model.model,
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            tokenizer_fingerprint=None,
            logprobs_mode=model.logprobs_mode,
            numerics="default",
            prefixes_by_path=compat.PREFIXES_KEYED_BY_ADAPTER_PATH,
            policy_version=self.policy_version,
            oldest_version_in_flight=self.policy_version,
            paused=False,
            lease_held=True,
        )

    def attach(self, specs: list[ParameterSpec]) -> Attachment:
        return Attachment.model_validate(
            self._worker("attach", [spec.model_dump() for spec in specs])
        )

    def open_channel(self, specification: dict) -> None:
        self._worker("open_channel", specification)

    def load_weights(self, tensors: list[ParameterSpec]) -> None:
        self._worker("load_weights", [tensor.model_dump() for tensor in tensors])

    def load_weights_again(self, messages: list[int]) -> None:
        self._worker("load_weights_again", messages)

    def finish_weights(self) -> list[str]:
        return self._worker("finish_weights")

    def trace(self, of: str, specs: list[ParameterSpec]) -> dict[str, str]:
        self.traced = of, specs
        found = self._worker("trace", of, [spec.model_dump() for spec in specs], None)
        self.assembly = Assembly({spec.name: spec.shape for spec in specs}, [found["parts"]])
        return self.assembly.refused | found["refused"]

    def fingerprints(self, of: str) -> FingerprintsReply:
        seen = self._worker("inspect")
        if seen["moved"]:
            self.trace(*self.traced)
        sums = self.assembly.sum([self._worker("fingerprints", of, None)])
        return FingerprintsReply(
            policy_version=self.policy_version, fingerprints=sums, changed=seen["changed"]
        )

    def cached_tokens(self, prompt_ids: list[int]) -> int:
        """Prefixes are not cached here."""
        return 0

    def sample(
        self, prompt_ids: list[int], num_tokens: int, temperature: float, num_samples: int = 1
    ) -> list[tuple[list[int], list[float]]]:
        params = SamplingParams(
            n=num_samples,
            max_tokens=num_tokens,
            temperature=temperature,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        (output,) = self.llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
        return [
            (
                list(row.token_ids),
                [entry[token].logprob for token, entry in zip(row.token_ids, row.logprobs)],
            )
            for row in output.outputs
        ]

    def resume(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def pause(self, clear_cache: bool, in_place: bool) -> None:
        """Nothing is in flight, and nothing is cached."""

    def hold_lease(self) -> None:
        """Both sides are one process."""

    release_lease: Callable[["Engine"], None] = hold_lease

    def _worker(self, method: str, *arguments):
        (result,) = self.llm.collective_rpc(f"trl_atropos_{method}", args=arguments)
        return result
