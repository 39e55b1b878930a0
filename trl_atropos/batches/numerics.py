"""`numerics`: makes the trainer compute more closely what the server does.

With `float32_head`, the product with the head's weights is computed in float32, as on the server.

With `bitwise`, the trainer scores rollouts with the server's own kernels, in the order in which it
runs them. vLLM's batch-invariant mode computes a token alike whatever else is in the batch, in
prefill and in decoding. The same kernels compute the forward pass of a dense Qwen2.5, Qwen3 or
Llama model on packed rollouts, so that trainer and server agree to the last bit. The backward pass
is torch's own: each operation has the gradient of the ordinary one, at the values that the server's
kernel found.

`training/computation.py` calls `use` on each model.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import pad, silu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from trl.trainer.utils import add_fused_lm_head

from trl_atropos.batches.packed_attention import RowFormat, attend
from trl_atropos.errors import RecipeError
from trl_atropos.protocol import LONGEST_QUERY

FAMILIES = ("llama", "qwen2", "qwen3")  # `model_type` of the models that `bitwise` computes
VLLM_VERSION = "0.26"  # its kernels are used; those of other versions were not compared
VOCABULARY_MULTIPLE = 64  # vLLM pads the head to a multiple of this
PAGE = 16  # tokens of a page of the KV cache, as on the server
ROWS_AT_ONCE = 2048  # tokens whose logits are in memory at the same time
SLOW_ON_GPUS = "The trainer computes in float32, for which a GPU takes several times as long"
IN_16_BITS = (
    "Set `bf16: true`, as TRL does by default: the weights stay in float32. Or set `dtype: "
    "bfloat16`, with which only the optimizer keeps them in float32."
)


def use(args: Any, model: torch.nn.Module, device: torch.device, sharded: bool) -> None:
    """Sets up a model as `args.numerics` says. Raises `RecipeError` if that is impossible for this
    model."""
    reason = _why_unavailable(args.numerics, model, device, sharded)
    if reason is not None:
        raise RecipeError(
            f"`numerics: {args.numerics}` is not available {reason}",
            f"numerics: {args.numerics}",
            "Change that, or leave `numerics` out.",
        )
    if args.numerics == "float32_head":
        use_float32_head(model, args.temperature)
    elif args.numerics == "bitwise":
        row_format = RowFormat.of(model, device, None, 1)
        kernels = Kernels(model.config, device, model.dtype)
        Exact(model, row_format, kernels).install()


def float32_precision(device: torch.device) -> str:
    """Returns how matrices in float32 are multiplied: "ieee" in float32, "tf32" with 10 bits.

    `torch.get_float32_matmul_precision` raises where `tf32: true` is set: Transformers sets it by
    another function of torch's (https://github.com/huggingface/transformers/issues/42371).
    """
    if device.type != "cuda":
        return "ieee"
    precision = torch.backends.cuda.matmul.fp32_precision
    return "ieee" if precision == "none" else precision


def is_slow(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a GPU multiplies matrices of this dtype without its tensor cores."""
    if device.type != "cuda" or dtype is not torch.float32:
        return False
    return float32_precision(device) == "ieee"


def _why_unavailable(
    numerics: str, model: torch.nn.Module, device: torch.device, sharded: bool
) -> str | None:
    """Returns what `numerics` is not available for, as a message says it, or `None` if it is."""
    if numerics == "float32_head" and sharded:
        return "for a sharded trainer"
    if numerics == "float16" and model.dtype is not torch.float32:
        return f"for weights in {model.dtype}, only with `dtype: float32`"
    if numerics == "bitwise":
        return why_not(model, device, sharded)
    return None


def use_float32_head(model: torch.nn.Module, temperature: float) -> None:
    """Makes TRL compute the head's product in float32, by copies of the weights. TRL's
    `cast_lm_head_to_fp32` alone would make the weights themselves float32, which the server may
    share."""
    policy = model.get_base_model() if isinstance(model, PeftModel) else model
    head = policy.get_output_embeddings

    def in_float32() -> SimpleNamespace:
        weight = head().weight.float()
        bias = head().bias
        if bias is not None:
            bias = bias.float()
        return SimpleNamespace(weight=weight, bias=bias)

    outputs = ("log_probs", "entropy")
    add_fused_lm_head(policy, temperature, cast_lm_head_to_fp32=True, outputs=outputs)
    policy.get_output_embeddings = in_float32


def why_not(model: torch.nn.Module, device: torch.device, sharded: bool) -> str | None:
    """Returns why a model cannot be computed here as the server does, or `None` if it can."""
    config = model.config
    if not _is_hopper(device):
        return "without a Hopper GPU (H100, H200), for which vLLM's kernels were compared"
    if sharded:
        return "for a sharded trainer"
    if isinstance(model, PeftModel):
        return "for adapters, which the server computes apart"
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return f"for {config.model_type} models, only for those of {', '.join(FAMILIES)}"
    layer_types = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layer_types:
        return "for attention with a window"
    if model.dtype is not torch.bfloat16:
        return f"for weights in {model.dtype}, only with `dtype: bfloat16`"
    return None


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == 9


# ---------------------------------------------------------------------------- the server's kernels


class Kernels:
    """
    Calls the kernels of vLLM's batch-invariant mode on Hopper GPUs. None of them records gradients.

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
            raise RecipeError(
                f"`numerics: bitwise` needs vLLM {VLLM_VERSION} for GPUs beside the trainer",
                f"numerics: bitwise ({error})",
                "Install it.",
            ) from error
        self.ops = _custom_ops
        self.attention = flash_attn_varlen_func
        self.linear = batch_invariant.linear_batch_invariant
        self.norm = batch_invariant.rms_norm_batch_invariant
        self.version = get_flash_attn_version()
        self._logprobs = compute_token_logprobs
        self.head_dim = getattr(config, "head_dim", None)
        if not self.head_dim:
            self.head_dim = config.hidden_size // config.num_attention_heads
        with set_current_vllm_config(VllmConfig()), device:
            rope = get_rope(
                self.head_dim,
                config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
                dtype=dtype,
            )
        self.angles = rope.cos_sin_cache.to(device)  # (positions, head_dim): cosines, then sines

    def rotate(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        heads = (-1, self.head_dim)
        query = query.flatten(1).clone()
        key = key.flatten(1).clone()
        self.ops.rotary_embedding(positions, query, key, self.head_dim, self.angles, True)
        return query.unflatten(1, heads), key.unflatten(1, heads)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty_like(gate)
        both = torch.cat([gate, up], dim=-1)
        torch.ops._C.silu_and_mul(out, both)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pages: "Pages") -> Tensor:
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

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        # The kernel sums in an order that depends on how rows lie in memory. On the server, they
        # lie there with this padding.
        vocabulary = logits.shape[1]
        padded = pad(logits, (0, -vocabulary % VOCABULARY_MULTIPLE))
        logprobs = self._logprobs(padded[:, :vocabulary], tokens[:, None])  # (N, 1)
        return logprobs[:, 0]


class Pages:
    """
    Lays the rollouts of a row into the pages of a KV cache.

    Rollouts of 3 and 2 tokens with pages of 2 tokens, where a dot is an empty slot:

        row        a  b  c | d  e
        pages      a  b | c  . | d  e | .  .     `count` is 4: more than enough for any lengths
        slots      0  1  2 | 4  5
        table      0  1 | 2  3                   the pages of each rollout

    Attributes:
        lengths: int32 (rollouts,), in tokens.
        longest: of the lengths.
        borders: int32 (rollouts + 1,), of the rollouts in the row.
        count: of the pages.
        slots: (T,), of each token among those of all pages.
        table: int32 (rollouts, pages of the longest).
    """

    def __init__(self, positions: Tensor, rollouts: dict[str, Any]):
        """
        Args:
            positions: (T,), of each token in its rollout.
            rollouts: where these are in the row, from `packed_attention.RowFormat.inputs`.
        """
        self.rollouts = rollouts
        if "rollout_lengths" in rollouts:
            self.lengths = rollouts["rollout_lengths"][0]
            self.longest = int(self.lengths.max())
            ends = self.lengths.cumsum(0, dtype=torch.int32)
            self.borders = pad(ends, (1, 0))
        else:
            self.borders = rollouts["cu_seq_lens_q"]
            self.longest = rollouts["max_length_q"]
            self.lengths = self.borders.diff()
        counts = (self.lengths + PAGE - 1) // PAGE  # (rollouts,), in pages
        first = (counts.cumsum(0) - counts).to(torch.int32)  # (rollouts,), page of each
        rollout = torch.repeat_interleave(self.lengths, output_size=len(positions))  # (T,)
        first_slot = first[rollout].long() * PAGE  # (T,)
        self.slots = first_slot + positions
        self.count = len(positions) // PAGE + len(self.lengths)
        most = math.ceil(self.longest / PAGE)
        pages = torch.arange(most, device=positions.device, dtype=torch.int32)
        table = first[:, None] + pages
        self.table = table.clamp(max=self.count - 1)

    def filled(self, values: Tensor) -> Tensor:
        """Returns values of the row, (T, heads, head_dim), as (pages, PAGE, heads, head_dim)."""
        _, *shape = values.shape
        memory = values.new_zeros(self.count * PAGE, *shape)
        memory = memory.index_copy(0, self.slots, values)
        return memory.unflatten(0, (-1, PAGE))


# ------------------------------------------------------------------------------- the forward pass


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ordinary, exact):
        return exact

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def replaced(ordinary: Tensor, exact: Tensor) -> Tensor:
    """Returns a tensor with the values of `exact` and the gradient of `ordinary`."""
    return _Replaced.apply(ordinary, exact.detach())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kernels):
        ctx.save_for_backward(x, weight)
        return kernels.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_x = None
        of_weight = None
        of_bias = None
        if wants_x:
            of_x = gradient @ weight
        if wants_weight:
            of_weight = gradient.t() @ x
        if wants_bias:
            of_bias = gradient.sum(0)
        return of_x, of_weight, of_bias, None


class Exact:
    """Computes the forward pass of a model by `kernels`."""

    def __init__(self, model: PreTrainedModel, row_format: RowFormat, kernels: Any):
        self.model = model
        self.row_format = row_format
        self.kernels = kernels
        self.backbone = model.base_model
        self._fused = model.forward
        self._hidden: Tensor | None = None  # the last output of the backbone

    def install(self) -> None:
        """Replaces the forward pass of the backbone, and the one that TRL has fused with its
        loss."""
        self.backbone.forward = self._backbone
        self.model.forward = self._scored

    def _scored(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        **options: Any,
    ):
        """Computes TRL's forward pass, with the server's log-probabilities instead of those of
        TRL's head."""
        outputs = self._fused(*args, fused_lm_head=fused_lm_head, labels=labels, **options)
        if fused_lm_head:
            tokens = labels[:, 1:]  # (R, T - 1)
            scored = tokens != -100
            hidden = self._hidden[:, :-1]  # (R, T - 1, hidden size)
            exact = self._logprobs(hidden[scored], tokens[scored])  # (N,)
            ordinary = outputs.log_probs
            exact = ordinary.detach().masked_scatter(scored, exact)
            outputs.log_probs = replaced(ordinary, exact)
        self._hidden = None
        return outputs

    def _backbone(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        use_cache: bool = False,
        **rollouts: Any,
    ) -> BaseModelOutputWithPast:
        """
        Computes the hidden states of all tokens.

        Args:
            input_ids: a row of rollouts, or a batch of sequences that are all as long, without
                padding.
            rollouts: where they are in the row, from `packed_attention.RowFormat.inputs`.
        """
        count, length = input_ids.shape
        if position_ids is None:
            positions = torch.arange(length, device=input_ids.device).repeat(count)[None]
            rollouts = self.row_format.inputs(positions, np.full(count, length))
            position_ids = rollouts.pop("position_ids")
            rollouts.pop("attention_mask")
        positions = position_ids[0]  # (T,)
        pages = Pages(positions, rollouts)
        checkpoints = (
            self.backbone.training
            and torch.is_grad_enabled()
            and self.model.is_gradient_checkpointing
        )
        state = self.backbone.embed_tokens(input_ids.flatten())  # (T, hidden size)
        for layer in self.backbone.layers:
            if checkpoints:
                state = checkpoint(self._layer, layer, state, positions, pages, use_reentrant=False)
            else:
                state = self._layer(layer, state, positions, pages)
        state = self._norm(self.backbone.norm, state)
        state = state.view(count, length, -1)
        self._hidden = state.detach()
        return BaseModelOutputWithPast(last_hidden_state=state)

    def _layer(self, layer: Any, state: Tensor, positions: Tensor, pages: Pages) -> Tensor:
        """Returns a layer's output, (T, hidden size), as its input is."""
        attended = self._attend(layer.self_attn, layer.input_layernorm, state, positions, pages)
        state = state + attended
        mlp = layer.mlp
        x = self._norm(layer.post_attention_layernorm, state)
        gate = self._linear(mlp.gate_proj, x)
        up = self._linear(mlp.up_proj, x)
        exact = self.kernels.gate(gate.detach(), up.detach())
        x = replaced(silu(gate) * up, exact)
        return state + self._linear(mlp.down_proj, x)

    def _attend(
        self, attention: Any, norm: Any, state: Tensor, positions: Tensor, pages: Pages
    ) -> Tensor:
        """Returns what a layer's attention adds to the state, (T, hidden size)."""
        heads = (-1, attention.head_dim)
        x = self._norm(norm, state)
        query = self._linear(attention.q_proj, x).unflatten(1, heads)  # (T, heads, head_dim)
        key = self._linear(attention.k_proj, x).unflatten(1, heads)
        value = self._linear(attention.v_proj, x).unflatten(1, heads)
        if hasattr(attention, "q_norm"):
            query = self._norm(attention.q_norm, query)
            key = self._norm(attention.k_norm, key)
        query, key = self._rotate(positions, query, key)
        exact = self.kernels.attend(query.detach(), key.detach(), value.detach(), pages)
        batch = [states.transpose(0, 1)[None] for states in (query, key, value)]
        scaling = attention.scaling
        ordinary, _ = attend(attention, *batch, None, scaling=scaling, **pages.rollouts)
        x = replaced(ordinary[0], exact)
        return self._linear(attention.o_proj, x.flatten(1))

    def _linear(self, module: torch.nn.Linear, x: Tensor) -> Tensor:
        return _Linear.apply(x, module.weight, module.bias, self.kernels)

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        ordinary = module(x)
        exact = self.kernels.norm(x.detach(), module.weight.detach(), module.variance_epsilon)
        return replaced(ordinary, exact)

    def _rotate(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.kernels.angles[positions]
        cosines, sines = angles.chunk(2, dim=-1)  # (T, head_dim / 2) each
        cosines = cosines.repeat(1, 2)
        sines = sines.repeat(1, 2)
        ordinary_query, ordinary_key = apply_rotary_pos_emb(query, key, cosines, sines)
        exact_query, exact_key = self.kernels.rotate(positions, query.detach(), key.detach())
        return replaced(ordinary_query, exact_query), replaced(ordinary_key, exact_key)

    @torch.no_grad()
    def _logprobs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """
        Returns log-probabilities of tokens, float32 (N,), in nats.

        Args:
            hidden: (N, hidden size), the backbone's output.
            tokens: (N,), what came next.
        """
        head = self.model.get_output_embeddings()
        logprobs = []
        pieces = zip(hidden.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE))
        for states, next_tokens in pieces:
            logits = self.kernels.linear(states, head.weight, head.bias)
            logprobs.append(self.kernels.logprobs(logits, next_tokens))
        return torch.cat(logprobs)
