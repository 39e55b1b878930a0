"""`AtroposGRPOTrainer`: TRL's `GRPOTrainer` with rollouts from a `RolloutSource` in place of a prompt dataset.

The seam is one method: `_generate_and_score_completions` is wrapped. TRL's own body still pads, scores under the old
and the reference policy, corrects for the sampler, and logs; it gets the rows through its own `rollout_func` hook and
their scores through an ordinary reward function. Only the advantages are set here, because Atropos groups have sizes
of their own. What this file touches of TRL without a promise: `_generate_and_score_completions`, `rollout_func`,
`num_generations`, `use_vllm`, `_last_loaded_step`, `vllm_generation`, `_metrics`, `_logs`. `tests/test_trl_seam.py`
fails when one of them moves.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.advantages import advantage_tensor, logged_advantages, share_zero_variance
from trl_atropos.rollouts.replay import ReplaySource
from trl_atropos.rollouts.schema import Row
from trl_atropos.rollouts.source import AtroposSource, RolloutSource, RunInfo
from trl_atropos.weights.colocate import ColocatePublisher
from trl_atropos.weights.publisher import NullPublisher, PolicyPublisher

POLL_SECONDS = 1.0  # how often waiting ranks hear from rank 0, well below any process group's timeout

NOT_SUPPORTED = {
    "reward_funcs": "rewards come with the rollouts: score them in the environment",
    "reward_processing_classes": "rewards come with the rollouts: score them in the environment",
    "train_dataset": "prompts come with the rollouts: pass a `rollout_source`, or nothing to use `args.atropos_url`",
    "eval_dataset": "evaluation inside the trainer is not supported: evaluate in the environment",
    "rollout_func": "pass a `rollout_source` instead",
    "environment_factory": "Atropos environments run in processes of their own",
    "tools": "tools are called by the environment",
}


def atropos_score(prompts, completions, score, **kwargs) -> list[float]:
    """The reward function that TRL calls: hands on the environment's score, one per row."""
    return score


def source_of(args: AtroposGRPOConfig) -> RolloutSource:
    """The rollout source that the configuration names."""
    if args.replay_paths is not None:
        return ReplaySource(args.replay_paths, single_row_groups=args.single_row_groups)
    return AtroposSource(
        args.atropos_url,
        reset_api=args.reset_atropos,
        single_row_groups=args.single_row_groups,
        record_to=f"{args.output_dir}/rollouts.jsonl" if args.record_rollouts else None,
    )


def publisher_of(args: AtroposGRPOConfig) -> PolicyPublisher:
    """The policy publisher that the configuration names."""
    if args.replay_paths is not None:
        return NullPublisher()
    return ColocatePublisher(args.vllm_server_base_url, args.publish_timeout, args.probe_every_n_steps)


class AtroposGRPOTrainer(GRPOTrainer):
    """
    GRPO on rollouts from Atropos environments.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            As in [`~trl.GRPOTrainer`].
        args ([`AtroposGRPOConfig`]):
            The configuration; `max_steps` is required.
        rollout_source ([`RolloutSource`], *optional*):
            Where rows come from. Defaults to the Atropos API at `args.atropos_url`, or to `args.replay_paths`.
        policy_publisher ([`PolicyPublisher`], *optional*):
            How new weights reach the sampler. Defaults to what `args.vllm_mode` names.
        kwargs:
            Anything else that [`~trl.GRPOTrainer`] takes: `processing_class`, `callbacks`, `optimizers`,
            `peft_config`, `quantization_config`. Prompts and rewards come with the rollouts, so there is no
            `train_dataset` and no `reward_funcs`.

    Example:

    ```python
    trainer = AtroposGRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=AtroposGRPOConfig(output_dir="runs/mine", max_steps=200),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "atropos"]
    _name = "GRPO on Atropos rollouts"

    def __init__(
        self,
        model: Any,
        args: AtroposGRPOConfig,
        *,
        rollout_source: RolloutSource | None = None,
        policy_publisher: PolicyPublisher | None = None,
        **kwargs: Any,
    ):
        for name, reason in NOT_SUPPORTED.items():
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"`{name}` was given, but {reason}.")
        if not isinstance(args, AtroposGRPOConfig):
            raise ValueError(
                f"`args` is a {type(args).__name__}: pass `AtroposGRPOConfig(output_dir=..., max_steps=...)`, which "
                "takes every argument of GRPOConfig."
            )
        self.rollout_source = rollout_source if rollout_source is not None else source_of(args)
        self.policy_publisher = policy_publisher if policy_publisher is not None else publisher_of(args)
        self._rows: list[Row] = []  # this rank's rows of the current generation batch
        try:
            super().__init__(
                self.policy_publisher.load(model, args),
                reward_funcs=[atropos_score],
                args=args,
                train_dataset=Dataset.from_dict({"prompt": [""]}),
                **kwargs,
            )
            self.policy_publisher.attach(self)
        except BaseException:  # also on Ctrl-C: a lease that stayed open would keep others from the server
            self.policy_publisher.close()
            raise
        self.rollout_func = self._hand_over_rows
        # TRL corrects for the sampler only where it believes that vLLM sampled. Set after its constructor, which
        # would start a vLLM of its own; what that would have checked is checked in the configuration.
        self.use_vllm = args.vllm_importance_sampling_correction
        self.vllm_generation = None
        self._last_loaded_step = self.state.global_step
        self.add_callback(_TrainingBegins(self))

    # -------------------------------------------------------------------------------------------------------- training

    def train(self, *args: Any, **kwargs: Any):
        """As in [`~transformers.Trainer`]. The sampler is held until the weights that training starts with are in."""
        try:
            self.policy_publisher.hold()
            return super().train(*args, **kwargs)
        finally:
            self.policy_publisher.close()
            if self.accelerator.is_main_process:
                self.rollout_source.close()

    def _begin(self, optimizer: Any) -> None:
        """Called when training begins: a checkpoint, if any, is loaded."""
        self.policy_publisher.begin(optimizer, self.state.global_step)
        run = RunInfo(
            batch_size=self.args.generation_batch_size,
            max_sequence_length=self._max_sequence_length(),
            temperature=self.args.temperature,
            starting_step=self.state.global_step,
            max_steps=self.args.max_steps,
            output_dir=self.args.output_dir,
            save_steps=int(self.args.save_steps) if self.args.save_strategy == "steps" else 0,
            run_name=self.args.run_name or "trl_atropos",
            rows_consumed=self._rows_consumed(),
            vocab_size=self.accelerator.unwrap_model(self.model).get_input_embeddings().num_embeddings,
        )
        self._on_main_process(lambda: self.rollout_source.start(run))

    def _rows_consumed(self) -> int:
        """Rows that the steps so far took. A batch that a checkpoint fell into the middle of counts as a whole."""
        micro_batches = self.state.global_step * self.args.gradient_accumulation_steps
        batches = math.ceil(micro_batches / (self.args.steps_per_generation * self.args.num_iterations))
        return batches * self.args.generation_batch_size

    def _on_main_process(self, call: Callable[[], Any]) -> Any:
        """Result of `call`, made on rank 0, on every rank. Or its error: raised on one rank alone, the others hang."""
        outcome: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                outcome = [call(), None]
            except Exception as error:  # noqa: BLE001 - raised again below, on every rank
                outcome = [None, error]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome, from_process=0)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def _max_sequence_length(self) -> int:
        """As asked for (a publisher refuses what its server cannot take), else the server's limit, or the model's."""
        served = self.policy_publisher.server_max_length()
        model = self.accelerator.unwrap_model(self.model)
        return self.args.max_sequence_length or served or model.config.max_position_embeddings

    def get_train_dataloader(self) -> DataLoader:
        """
        One empty item per micro-batch: the rows come from `rollout_source`.

        Not prepared by accelerate, whose loader reads one batch ahead: it would wait for rollouts of the next policy
        before the current one is trained. Exactly as long as the run, because a shorter one would end an epoch, and
        with it a gradient accumulation, in the middle.
        """
        length = self.args.max_steps * self.args.gradient_accumulation_steps
        return DataLoader(range(length), batch_size=1, collate_fn=lambda items: [{"prompt": ""}])

    # -------------------------------------------------------------------------------------------------------- the seam

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            raise RuntimeError("evaluation inside the trainer is not supported: evaluate in the environment")
        rows = self._next_rows()
        local = len(rows) // self.accelerator.num_processes
        here = slice(self.accelerator.process_index * local, (self.accelerator.process_index + 1) * local)
        self._rows = rows[here]
        prompts = self.processing_class.batch_decode([row.prompt_ids for row in self._rows])
        self._last_loaded_step = self.state.global_step  # the publisher has synchronised: TRL must not
        # TRL groups by a fixed size. One group of all rows keeps its statistics defined for any batch; what it
        # derives from them is replaced below.
        asked, self.num_generations = self.num_generations, len(rows)
        try:
            output = super()._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
        finally:
            self.num_generations = asked
        length = output["completion_ids"].size(1)
        output["advantages"] = advantage_tensor(rows, here, self.scale_rewards, length).to(self.accelerator.device)
        self._correct_logs(rows)
        return output

    def _hand_over_rows(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's `rollout_func` hook. `score` goes to the reward function, `env_mask` becomes TRL's tool mask."""
        return {
            "prompt_ids": [row.prompt_ids for row in self._rows],
            "completion_ids": [row.completion_ids for row in self._rows],
            "logprobs": [row.logprobs for row in self._rows],
            "env_mask": [row.mask for row in self._rows],
            "score": [row.score for row in self._rows],
        }

    def _next_rows(self) -> list[Row]:
        """The next generation batch, the same on every rank. Rank 0 pulls and tells the others how it stands."""
        started = time.monotonic()
        rows = None
        while rows is None:
            rows = self._on_main_process(lambda: self._poll(time.monotonic() - started))
        self._metrics["train"]["time/wait_for_rollouts"].append(time.monotonic() - started)
        return rows

    def _poll(self, waited: float) -> list[Row] | None:
        """Rows, or nothing yet."""
        rows = self.rollout_source.poll(self.args.generation_batch_size, POLL_SECONDS)
        if rows is None and waited > self.args.rollout_timeout:
            raise RolloutError(
                f"No batch of {self.args.generation_batch_size} rollouts for {waited:.0f} s "
                f"(`rollout_timeout`). {self.rollout_source.diagnose()}"
            )
        return rows

    def _correct_logs(self, rows: list[Row]) -> None:
        """Replaces what TRL logged from its one big group by the truth about the rows' own groups, and adds ours."""
        metrics = self._metrics["train"]
        metrics["frac_reward_zero_std"][-1] = share_zero_variance(rows)
        logged = self._logs["advantages"]
        for _ in range(min(len(rows), len(logged))):
            logged.pop()
        logged.extend(logged_advantages(rows, self.scale_rewards))
        # A mean over the logging window would be no version, and would hide the worst probe.
        metrics["policy/version"] = [float(self.policy_publisher.policy_version)]
        own = self.policy_publisher.pop_metrics()
        worst = own.pop("policy/probe_max_abs_diff", None)
        if worst is not None:
            metrics["policy/probe_max_abs_diff"] = [max([worst, *metrics["policy/probe_max_abs_diff"]])]
        if self.accelerator.is_main_process:
            own |= self.rollout_source.metrics()
        for name, value in own.items():
            metrics[name].append(value)

    # ------------------------------------------------------------------------------------------------------ model card

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags=None) -> None:
        """As in TRL, with a section that names the run: environments, steps and settings that shaped it."""
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if self.is_world_process_zero():
            from trl_atropos.report.card import add_run_section

            add_run_section(f"{self.args.output_dir}/README.md", self.args, self.state)


class _TrainingBegins(TrainerCallback):
    """Tells the trainer when a checkpoint is loaded and the optimizer exists."""

    def __init__(self, trainer: AtroposGRPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.trainer._begin(optimizer)
