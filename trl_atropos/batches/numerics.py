"""`numerics`: how the trainer computes more closely what the server does.

With `float32_head`, the product with the head's weights is computed in float32, as on the server.

With `bitwise`, the trainer scores rollouts with the server's own kernels, in the order in which it
runs them. vLLM's batch-invariant mode computes a token alike whatever else is in the batch, in
prefill and in decoding. The same kernels compute the forward pass of a dense Qwen2.5, Qwen3 or
Llama model on packed rollouts, so that trainer and server agree to the last bit. The backward pass
is torch's own: each operation has the gradient of the ordinary one, at the values that the server's
kernel found.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from trl.trainer.utils import add_fused_lm_head

from trl_atropos.batches.packing import How, attend
from trl_atropos.errors import RecipeError
from trl_atropos.protocol import LONGEST_QUERY

FAMILIES = ("llama", "qwen2", "qwen3")  # `model_type` of what is computed here
VLLM_VERSION = "0.26"  # whose kernels these are; those of other versions were not compared
VOCABULARY_MULTIPLE = 64  # that vLLM pads the head to
PAGE = 16  # tokens of a page of the KV cache, as on the server
ROWS_AT_ONCE = 2048  # tokens whose logits are in memory at the same time
ROW = 64  # tokens that a model's own forward pass is compared on
# nats that two computations of that row may differ by in the mean, where nothing is rounded to 16
# bits
APART = 1e-3


class Kernels:
    """
    The kernels of vLLM's batch-invariant mode on Hopper GPUs. None of them records gradients.

    Args:
        config: of the model.
        dtype: of weights and activations.
    """

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype):
        try:
            from vllm import _custom_ops
            from vllm.config import VllmConfig, set_current_vllm_config
            from vllm.model_executor.layers import batch_invariant
            from vllm.model_executor.layers.rotary_embedding import get_rope
            from vllm.v1.attention.backends.fa_utils import (
                flash_attn_varlen_func,
                get_flash_attn_version,
            )
            from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
        except ImportError as error:
            what = f"`numerics: bitwise` needs vLLM {VLLM_VERSION} for GPUs beside the trainer"
            fix = "Install it."
            raise RecipeError(what, f"numerics: bitwise ({error})", fix) from error

        self.ops = _custom_ops
        self.attention = flash_attn_varlen_func
        self.linear = batch_invariant.linear_batch_invariant
        self.norm = batch_invariant.rms_norm_batch_invariant
        self.version = get_flash_attn_version()
        self._logprobs = compute_token_logprobs
        self.head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        with set_current_vllm_config(VllmConfig()), device:
            sizes = self.head_dim, config.max_position_embeddings
            rope = get_rope(*sizes, rope_parameters=config.rope_parameters, dtype=dtype)
        self.angles = rope.cos_sin_cache.to(device)  # (positions, head_dim): cosines, then sines

    def rotate(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        query = query.flatten(1).clone()
        key = key.flatten(1).clone()
        self.ops.rotary_embedding(positions, query, key, self.head_dim, self.angles, True)
        return query.unflatten(1, (-1, self.head_dim)), key.unflatten(1, (-1, self.head_dim))

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(gate)
        torch.ops._C.silu_and_mul(out, torch.cat([gate, up], dim=-1))
        return out

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pages: "Pages"
    ) -> torch.Tensor:
        return self.attention(
            q=query.contiguous(),
            k=pages.filled(key),
            v=pages.filled(value),
            cu_seqlens_q=pages.borders,
            max_seqlen_q=max(pages.longest, LONGEST_QUERY),
            seqused_k=pages.lengths,
            max_seqlen_k=pages.longest,
            softmax_scale=self.head_dim**-0.5,
            causal=True,
            window_size=[-1, -1],
            block_table=pages.table,
            softcap=0.0,
            fa_version=self.version,
            num_splits=1,
        )

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # The kernel sums in an order that depends on how rows lie in memory: on the server, with
        # this padding.
        padded = pad(logits, (0, -logits.shape[1] % VOCABULARY_MULTIPLE))
        return self._logprobs(padded[:, : logits.shape[1]], tokens[:, None])[:, 0]


class Pages:
    """The pages of a KV cache that holds the rollouts of a row."""

    def __init__(self, positions: torch.Tensor, rollouts: dict[str, Any]):
        """
        Args:
            positions: (T,), of each token in its rollout.
            rollouts: where these are in the row, from `packing.How.inputs`.
        """
        self.rollouts = rollouts
        if "rollout_lengths" in rollouts:
            self.lengths = rollouts["rollout_lengths"][0]
            self.longest = int(self.lengths.max())
            self.borders = pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            self.borders = rollouts["cu_seq_lens_q"]
            self.longest = rollouts["max_length_q"]
            self.lengths = self.borders.diff()
        counts = (self.lengths + PAGE - 1) // PAGE
        first = (counts.cumsum(0) - counts).to(torch.int32)
        rollout = torch.repeat_interleave(self.lengths, output_size=len(positions))
        self.slots = first[rollout].long() * PAGE + positions
        self.count = len(positions) // PAGE + len(self.lengths)
        table = first[:, None] + torch.arange(
            -(-self.longest // PAGE), device=positions.device, dtype=torch.int32
        )
        self.table = table.clamp(max=self.count - 1)

    def filled(self, values: torch.Tensor) -> torch.Tensor:
        """(T, heads, head_dim) to (pages, PAGE, heads, head_dim)."""
        memory = values.new_zeros(self.count * PAGE, *values.shape[1:])
        return memory.index_copy(0, self.slots, values).unflatten(0, (-1, PAGE))


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ordinary, exact):
        return exact

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def replaced(ordinary: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The values of `exact`, and the gradient of `ordinary`."""
    return _Replaced.apply(ordinary, exact.detach())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kernels):
        ctx.save_for_backward(x, weight)
        return kernels.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.t() @ x if of_weight else None,
            gradient.sum(0) if of_bias else None,
            None,
        )


class Exact:
    """The forward pass of a model, computed by `kernels`."""

    def __init__(self, model: PreTrainedModel, how: How, kernels: Any):
        self.model = model
        self.how = how
        self.kernels = kernels
        self.backbone = model.base_model
        self._fused = model.forward
        self._hidden: torch.Tensor | None = None  # the last output of the backbone

    def install(self) -> None:
        """Takes the place of the forward pass of the backbone, and of the head that TRL has fused
        with its loss."""
        self.backbone.forward = self._backbone
        self.model.forward = self._scored

    def _scored(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        **options: Any,
    ):
        """As TRL's forward pass, with the server's log-probabilities in place of those of TRL's
        head."""
        outputs = self._fused(*args, fused_lm_head=fused_lm_head, labels=labels, **options)
        if fused_lm_head:
            tokens = labels[:, 1:]
            scored = tokens != -100
            exact = self._logprobs(self._hidden[:, :-1][scored], tokens[scored])
            outputs.log_probs = replaced(
                outputs.log_probs, outputs.log_probs.detach().masked_scatter(scored, exact)
            )
        self._hidden = None
        return outputs

    def _backbone(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        use_cache: bool = False,
        **rollouts: Any,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: a row of rollouts, or a batch of sequences that are all as long, without
            padding. rollouts: where they are in the row, from `packing.How.inputs`.
        """
        count, length = input_ids.shape
        if position_ids is None:
            positions = torch.arange(length, device=input_ids.device).repeat(count)[None]
            rollouts = self.how.inputs(positions, np.full(count, length))
            position_ids = rollouts.pop("position_ids")
            rollouts.pop("attention_mask")
        positions = position_ids[0]
        pages = Pages(position_ids[0], rollouts)
        state = self.backbone.embed_tokens(input_ids.flatten())
        for layer in self.backbone.layers:
            if (
                self.backbone.training
                and torch.is_grad_enabled()
                and self.model.is_gradient_checkpointing
            ):
                state = checkpoint(self._layer, layer, state, positions, pages, use_reentrant=False)
            else:
                state = self._layer(layer, state, positions, pages)
        state = self._norm(self.backbone.norm, state).view(count, length, -1)
        self._hidden = state.detach()
        return BaseModelOutputWithPast(last_hidden_state=state)

    def _layer(
        self, layer: Any, state: torch.Tensor, positions: torch.Tensor, pages: Pages
    ) -> torch.Tensor:
        """Of a layer's input, (T, hidden size)."""
        attention = layer.self_attn
        mlp = layer.mlp
        x = self._norm(layer.input_layernorm, state)
        heads = (-1, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (
            self._linear(projection, x).unflatten(1, heads) for projection in projections
        )
        if hasattr(attention, "q_norm"):
            query = self._norm(attention.q_norm, query)
            key = self._norm(attention.k_norm, key)
        query, key = self._rotate(positions, query, key)
        exact = self.kernels.attend(query.detach(), key.detach(), value.detach(), pages)
        batch = (states.transpose(0, 1)[None] for states in (query, key, value))
        ordinary, _ = attend(attention, *batch, None, scaling=attention.scaling, **pages.rollouts)
        x = replaced(ordinary[0], exact)
        state = state + self._linear(attention.o_proj, x.flatten(1))
        x = self._norm(layer.post_attention_layernorm, state)
        gate = self._linear(mlp.gate_proj, x)
        up = self._linear(mlp.up_proj, x)
        x = replaced(silu(gate) * up, self.kernels.gate(gate.detach(), up.detach()))
        return state + self._linear(mlp.down_proj, x)

    def _linear(self, module: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, module.weight, module.bias, self.kernels)

    def _norm(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        return replaced(
            module(x),
            self.kernels.norm(x.detach(), module.weight.detach(), module.variance_epsilon),
        )

    def _rotate(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> list[torch.Tensor]:
        cosines, sines = (
            half.repeat(1, 2) for half in self.kernels.angles[positions].chunk(2, dim=-1)
        )
        ordinary = apply_rotary_pos_emb(query, key, cosines, sines)
        exact = self.kernels.rotate(positions, query.detach(), key.detach())
        return list(map(replaced, ordinary, exact))

    @torch.no_grad()
    def _logprobs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden: (N, hidden size), the backbone's output.
            tokens: (N,), what came next.

        Returns:
            Log-probabilities (N,), float32, in nats.
        """
        head = self.model.get_output_embeddings()
        parts = zip(hidden.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE))
        return torch.cat(
            [
                self.kernels.logprobs(self.kernels.linear(h, head.weight, head.bias), t)
                for h, t in parts
            ]
        )


def use(args: Any, model: torch.nn.Module, device: torch.device, sharded: bool) -> None:
    """Sets up a model that the trainer computes with. Raises `RecipeError` if its `numerics` is not
    there for that."""
    reason = None
    if args.numerics == "float32_head" and sharded:
        reason = "for a sharded trainer"
    elif args.numerics == "float32_head":
        use_float32_head(model, args.temperature)
    elif args.numerics == "float16" and model.dtype is not torch.float32:
        reason = f"for weights in {model.dtype}, but for `dtype: float32`"
    elif args.numerics == "bitwise" and not (reason := why_not(model, device, sharded)):
        Exact(
            model, How.of(model, device, None, 1), Kernels(model.config, device, model.dtype)
        ).install()
    if reason:
        what = f"`numerics: {args.numerics}` is not there {reason}"
        seen = f"numerics: {args.numerics}"
        raise RecipeError(what, seen, "Set what it is there for, or leave `numerics` out.")


def use_float32_head(model: torch.nn.Module, temperature: float) -> None:
    """TRL's `cast_lm_head_to_fp32` would make the weights float32, too, which the server may
    share."""
    policy = model.get_base_model() if isinstance(model, PeftModel) else model
    head = policy.get_output_embeddings

    def in_float32() -> SimpleNamespace:
        weight = head().weight
        bias = head().bias
        return SimpleNamespace(weight=weight.float(), bias=None if bias is None else bias.float())

    add_fused_lm_head(
        policy, temperature, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy")
    )
    policy.get_output_embeddings = in_float32


def why_not(model: torch.nn.Module, device: torch.device, sharded: bool) -> str | None:
    """Why a model cannot be computed here as the server does; `None` if it can."""
    config = model.config
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "without a Hopper GPU (H100, H200), for which vLLM's kernels were compared"
    if sharded:
        return "for a sharded trainer"
    if isinstance(model, PeftModel):
        return "for adapters, which the server computes apart"
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return f"for {config.model_type} models, but for those of {', '.join(FAMILIES)}"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "for attention with a window"
    if model.dtype is not torch.bfloat16:
        return f"for weights in {model.dtype}, but for `dtype: bfloat16`"
    return None


class Row:
    """
    A short row of tokens, and what a model computes of it.

    Args:
        config: of the model.
        longest: tokens that the model has positions for.
        autocast: the context that the trainer computes in; `dtype`: of products in there.
        temperature: that logits are divided by.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        longest: float,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager],
        dtype: torch.dtype,
        temperature: float = 1.0,
    ):
        length = int(min(ROW, longest))
        vocabulary = config.get_text_config().vocab_size
        self.ids = (torch.arange(length, device=device) * 7919 % (vocabulary - 1))[None]
        self.autocast = autocast
        self.dtype = dtype
        self.temperature = temperature

    @torch.no_grad()
    def outputs(self, model: torch.nn.Module, training: bool = False, **inputs: Any) -> Any:
        """Of one forward pass, in evaluation mode or in training mode."""
        before = model.training
        model.train(training)
        try:
            with self.autocast():
                return model(input_ids=self.ids, attention_mask=torch.ones_like(self.ids), **inputs)
        finally:
            model.train(before)

    def logits(self, model: torch.nn.Module, training: bool = False) -> torch.Tensor:
        """(1, T, V), float32, by the model's own head."""
        return self.outputs(model, training, use_cache=False).logits.float() / self.temperature

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """(1, T - 1), of each token after the one before it, in nats."""
        return logits[:, :-1].log_softmax(-1).gather(-1, self.ids[:, 1:, None])[..., 0]

    def allowed(self, logits: torch.Tensor) -> float:
        """Nats that log-probabilities may differ by in the mean, if these logits were rounded to
        the row's dtype."""
        largest = logits.abs().amax(-1).mean().item()
        return max(APART, torch.finfo(self.dtype).eps * largest)


def check_head(model: torch.nn.Module, row: Row) -> None:
    """Raises `RecipeError` if TRL's head, which computes log-probabilities from hidden states
    without the model's own code, leaves out what the model does to its logits, such as a cap or a
    scale."""
    logits = row.logits(model)
    if not logits.isfinite().all():  # damaged weights: the first step's gradient says so
        return
    fused = row.outputs(model, labels=row.ids, fused_lm_head=True).log_probs
    difference = (fused.float() - row.logprobs(logits)).abs().mean().item()
    if difference <= row.allowed(logits):  # false for NaN
        return
    family = model.config.get_text_config().model_type
    raise RecipeError(
        f"TRL's fused head computes other log-probabilities for models of the family {family} than "
        f"their own forward pass ({difference:.2g} nats apart in the mean): it leaves out, or "
        "adds, a cap or a scale of their logits",
        f"model_type: {family}",
        "Train a model of another family, or use a version of TRL whose `add_fused_lm_head` knows "
        "this one.",
    )


def noise_left(model: torch.nn.Module, row: Row) -> float | None:
    """Nats in the mean by which a model computes something else in training mode than in evaluation
    mode, where it is sampled from; `None` if that is rounding."""
    logits = row.logits(model)
    trained = row.logprobs(row.logits(model, training=True))
    difference = (trained - row.logprobs(logits)).abs().mean().item()
    return None if difference <= row.allowed(logits) else difference
