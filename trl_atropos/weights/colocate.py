"""`vllm_mode: colocate`: the trainer's parameters are views of the server's memory. Nothing is ever moved.

The model is loaded as usual, compared bit for bit with the server's, and then each parameter is replaced by a view,
which frees the loaded copy: one copy of the weights remains. The optimizer writes into it in place, under the fence.
"""

import logging
import time
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import create_model_from_path

from trl_atropos.errors import AttachError
from trl_atropos.protocol import ServerInfo, tokenizer_fingerprint
from trl_atropos.weights import layout
from trl_atropos.weights.client import ServerClient
from trl_atropos.weights.probe import Probe, Tolerance
from trl_atropos.weights.publisher import ServerPublisher

logger = logging.getLogger(__name__)


class ColocatePublisher(ServerPublisher):
    """
    Args:
        url (`str`): Base URL of the vLLM server, on this machine and device.
        timeout (`float`): Seconds that the server may take for any one step of a publish.
        probe_every_n_steps (`int`): Publishes between two probes; 0 for none.
        token (`str`, *optional*): Control token; defaults to `TRL_ATROPOS_TOKEN`.
    """

    writes_in_place = True

    def __init__(self, url: str, timeout: float = 60.0, probe_every_n_steps: int = 1, token: str | None = None):
        super().__init__()
        self.client = ServerClient(url, timeout, token)
        self.probe_every_n_steps = probe_every_n_steps
        self.clear_cache = True  # off, resumed requests and cached prefixes keep the old policy's keys and values
        self._views: dict[str, torch.Tensor] = {}
        self._info: ServerInfo | None = None
        self._probe: Probe | None = None
        self._publishes = 0
        self._writes_when_held = 0

    # ------------------------------------------------------------------------------------------------------- attach

    def load(self, model: Any, args: Any) -> PreTrainedModel:
        if args.world_size > 1:
            raise AttachError(
                f"vllm_mode='colocate' has one server's memory to train, but {args.world_size} processes were "
                "started: launch one (`--num_processes 1`)."
            )
        self._info = info = self.client.info()
        self.policy_version = info.policy_version
        if info.refusals:
            raise AttachError(
                f"The weights of the server at {self.client.url} cannot be trained in place: "
                f"{'; '.join(info.refusals)}."
            )
        if info.dtype != "float32":
            raise AttachError(
                f"The server's weights are {info.dtype}. Training them in place would lose every update smaller than "
                "their resolution: start the server with `--dtype float32`."
            )
        if info.logprobs_mode != "processed_logprobs":
            raise AttachError(
                f"The server returns {info.logprobs_mode}, which ignore the sampling temperature. Start it with "
                "`--logprobs-mode processed_logprobs`, or by `trl-atropos serve`, which sets it."
            )
        if args.max_sequence_length is not None and args.max_sequence_length > info.max_model_len:
            raise AttachError(
                f"`max_sequence_length` is {args.max_sequence_length}, but the server's max_model_len is "
                f"{info.max_model_len}: lower it, or start the server with `--max-model-len "
                f"{args.max_sequence_length}`."
            )
        model = self._load_model(model, args)
        self.client.hold_lease()
        started = time.perf_counter()
        try:
            self._views = layout.attach(model, self.client.attach(layout.specs_of(model)))
        except AttachError as error:
            raise AttachError(f"{error} (The server has {info.model}, the trainer {model.name_or_path}.)") from error
        logger.info(
            "attached %d parameters (%.1f MB) of %s in %.2f s, bit for bit the checkpoint",
            len(self._views),
            sum(view.nbytes for view in self._views.values()) / 1e6,
            self.client.url,
            time.perf_counter() - started,
        )
        return model

    def _load_model(self, model: Any, args: Any) -> PreTrainedModel:
        if isinstance(model, str):
            kwargs = dict(args.model_init_kwargs or {})
            if str(kwargs.get("dtype", "float32")).removeprefix("torch.") not in ("float32", "auto", "None"):
                raise AttachError(
                    f"The trainer's dtype is {kwargs['dtype']}, the server's float32. With vllm_mode='colocate' they "
                    "are the same memory: set `dtype: float32`."
                )
            # On the CPU first, so that the device never holds the weights twice.
            kwargs |= {"dtype": "float32", "device_map": None}
            kwargs.setdefault("trust_remote_code", args.trust_remote_code)
            set_seed(args.seed)
            model = create_model_from_path(model, **kwargs)
        if not isinstance(model, PreTrainedModel):
            raise AttachError(
                f"`model` is a {type(model).__name__}. vllm_mode='colocate' needs a name, a folder or a plain "
                "`PreTrainedModel`: adapters would never reach the server."
            )
        return model

    def attach(self, trainer: Any) -> None:
        if not isinstance(trainer.model, PreTrainedModel):
            raise AttachError(
                "vllm_mode='colocate' trains the server's own weights, but a `peft_config` was given (`use_peft`), "
                "whose adapter the server would never see: remove it."
            )
        info = self._info
        tokenizer = trainer.processing_class
        comparable = isinstance(tokenizer, PreTrainedTokenizerBase) and info.tokenizer_fingerprint is not None
        if comparable and tokenizer_fingerprint(tokenizer.get_vocab()) != info.tokenizer_fingerprint:
            raise AttachError(
                f"The trainer's tokenizer ({tokenizer.name_or_path}) and that of the server ({info.model}) have "
                "different vocabularies, so the same ids mean different text. Give both the same tokenizer."
            )
        self._model = trainer.model
        self._accelerator = trainer.accelerator
        compute = torch.bfloat16 if trainer.args.bf16 or trainer.args.fp16 else torch.float32
        if self.probe_every_n_steps:
            self._probe = Probe(
                self.client,
                trainer.args.temperature,
                Tolerance.for_dtype(compute),
                info.block_size,
                info.max_model_len,
                info.vocab_size,
            )

    def server_max_length(self) -> int:
        return self._info.max_model_len

    # -------------------------------------------------------------------------------------------------- each publish

    def hold(self) -> None:
        self.client.hold_lease()  # again, where `close` has ended a former training
        self._writes_when_held = self._writes()
        super().hold()

    def pause(self) -> None:
        """Everything depends on the parameters still being the server's memory: checked before the step writes."""
        lost = layout.detached(self._model, self._views)
        if lost:
            raise AttachError(
                f"{len(lost)} parameters are no longer the server's memory (first: {lost[0]!r}). Something replaced "
                "them after the trainer was built (`model.to`, a wrapper, `param.data = ...`): do that before."
            )
        self.client.pause(self.clear_cache)

    def transfer(self) -> None:
        """Nothing to move: the step has written into the server's memory."""

    def resume(self, policy_version: int) -> None:
        self.client.resume(policy_version)

    def probe(self) -> None:
        due = self._probe is not None and self._publishes % self.probe_every_n_steps == 0
        self._publishes += 1
        if not due:
            return
        started = time.perf_counter()
        with self._accelerator.autocast():
            result = self._probe.run(self._model, self.policy_version)
        self.probe_max_abs_diff = max(self.probe_max_abs_diff, result.max_abs_diff)
        self._note("policy/probe_max_abs_diff", result.max_abs_diff)
        self._note("time/probe", time.perf_counter() - started)

    def close(self) -> None:
        """Releases the lease. A server that is paused at this moment takes its weights for torn, and leaves."""
        if self._held and self._writes() == self._writes_when_held:
            self._held = False  # nothing was written since: the weights are whole
            self.client.resume(self.policy_version)
        self.client.release_lease()
        super().close()

    def _writes(self) -> int:
        """Counts in-place writes to the parameters, to tell whether loading a checkpoint got as far as writing."""
        return sum(parameter._version for parameter in self._model.parameters())
