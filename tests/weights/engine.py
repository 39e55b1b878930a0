"""A whole vLLM engine inside this process, whose weights can be reached, and which is judged by what it computes."""

from pathlib import Path

import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

from trl_atropos.protocol import Attachment
from trl_atropos.server import compat, layout, loader
from trl_atropos.transport import export_storage
from trl_atropos.weights.layout import open_views, replace
from trl_atropos.weights.names import checkpoint_tensors, parameter_specs

PROMPTS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0)).tolist()


class Engine:
    """An engine on the model in `folder`, started with our load format. One per process: vLLM keeps global state."""

    def __init__(self, folder: Path):
        self.llm = LLM(
            str(folder),
            dtype="float32",
            load_format=loader.LOAD_FORMAT,
            distributed_executor_backend="uni",
            logprobs_mode="processed_logprobs",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=64,
            max_num_seqs=4,
            disable_log_stats=True,
        )
        self.worker = self.llm.collective_rpc(lambda worker: worker)[0]
        self.model = self.worker.model_runner.get_model()

    def difference(self, reference: PreTrainedModel) -> float:
        """Largest difference between the engine's and the reference's log-probabilities of the prompts, in nats."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        # vLLM decorates the classes of some Hugging Face models, so that this one too wants to be compiled.
        reference.base_model.do_not_compile = True
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        largest = 0.0
        for ids, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                logits = reference(torch.tensor([ids]), use_cache=False).logits
            expected = logits[0, :-1].float().log_softmax(-1)
            for position, (token, given) in enumerate(zip(ids[1:], output.prompt_logprobs[1:], strict=True)):
                largest = max(largest, abs(given[token].logprob - expected[position, token].item()))
        return largest

    def attach(self, model: PreTrainedModel) -> dict[str, str]:
        """Makes the parameters of `model` views of the engine's memory, if all can be. Returns why which cannot."""
        before = {name: parameter.clone() for name, parameter in self.model.named_parameters()}
        with set_current_vllm_config(self.worker.vllm_config):
            views, refused = layout.trace(self.model, parameter_specs(model), torch.device("cpu"))
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter, before[name]), f"tracing has changed {name}"
        storages = [export_storage(storage) for storage in layout.unique_storages(self.model).values()]
        opened = open_views(model.named_parameters(), Attachment(storages=storages, views=views, refused=refused))
        if not opened.refused:
            replace(model, opened.views)
        return opened.refused

    def load(self, model: PreTrainedModel, tensors: dict[str, torch.Tensor], *, layerwise: bool) -> None:
        """Loads tensors that have `model`'s names. `layerwise`: with the processing that follows a first load."""
        weights = checkpoint_tensors(model, tensors.items())
        with torch.no_grad(), set_current_vllm_config(self.worker.vllm_config):
            if layerwise:
                compat.begin_reload(self.model)
            self.model.load_weights(weights)
            if layerwise:
                compat.finish_reload(self.model, self.worker.vllm_config.model_config)
