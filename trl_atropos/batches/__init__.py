"""From rollouts to the tensors of a loss: micro-batches, advantages, distillation."""
