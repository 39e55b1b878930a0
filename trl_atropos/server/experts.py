"""Mixture-of-experts layers on the CPU that multiply with the experts' parameters themselves.

vLLM's CPU kernel packs the experts into a layout of its own after the first load, and does not pack them again when
they are loaded another time: without this, no change of an expert would ever reach the logits.
"""

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


class InPlaceExperts(CPUUnquantizedExperts):
    """`w1` is (experts, gate and up, hidden), `w2` (experts, hidden, intermediate), as they were loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs nothing."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *unused,
        apply_router_weight_on_input: bool,
        **unused_too,
    ) -> None:
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            both = linear(hidden_states[tokens], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
            inner = self._activate(activation, both)
            result = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert])
            if not apply_router_weight_on_input:
                result *= topk_weights[tokens, choices, None].to(result.dtype)
            output.index_add_(0, tokens, result)

    def _activate(self, activation: MoEActivation, both: torch.Tensor) -> torch.Tensor:
        if activation is MoEActivation.SWIGLUOAI:  # as vLLM's SwigluOAIAndMul, for which the CPU build has no kernel
            gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(min=-7.0, max=7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        inner = both.new_empty(len(both), both.shape[-1] // 2)
        self.activation(activation, inner, both)
        return inner
