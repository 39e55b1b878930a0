"""Small mistakes that a careless change could bring, each with the test that catches it.

`python -m tests.house.mutations` (`make test-mutations`) makes them one by one in a copy of the
repository and runs the named test there, which must fail. `python -m tests.house.mutations 3 17` makes
only those two. `tests/house/test_mutations.py` holds the table to the code: a row whose code has been
rewritten gets the same mistake in the new code.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.forge import Forge

TIMEOUT = 300.0  # seconds for one test
LOG = "pytest.log"
CAUGHT, SURVIVED, TIMED_OUT = "caught", "SURVIVED", "TIMED OUT"
# by pytest's exit code; any other means that it could not run the test
OUTCOMES = {0: SURVIVED, 1: CAUGHT}
# Without bytecode: Python would take that of a file of the same size that was changed within the
# same second.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
# Has imported what takes long, and nothing of this repository: that comes from the folder in which
# a fork runs.
PYTEST = Forge(
    "import accelerate, datasets, peft, pytest, torch\nfrom trl import GRPOTrainer\n", ENVIRONMENT
)


# of several mutations, the test
DIVIDED = (
    "tests/trainer/test_sequence_parallel.py::test_rows_of_two_processes_give_gradients_of_one"
)


class Mutation(NamedTuple):
    file: str
    old: str  # stands exactly once in the file
    new: str
    test: str  # pytest's name of the test that fails with `new`

    def apply(self, text: str) -> str:
        """Returns the text of the file with the mistake in it."""
        return text.replace(self.old, self.new, 1)


MUTATIONS: list[Mutation] = [
    # --------------------------------------------------------------------------------------- agents
    Mutation(
        "trl_atropos/agents/agent_process.py",
        "    elif not ended_by_itself:",
        "    elif ended_by_itself:",
        "tests/agents/test_agent_process.py::test_end_of_agent_is_known",
    ),
    Mutation(
        "trl_atropos/agents/episode_environment.py",
        "        if number != self._pass:",
        "        if not self._order:",
        "tests/agents/test_tasks.py::test_each_pass_has_each_task_in_an_order_of_its_own",
    ),
    Mutation(
        "trl_atropos/agents/function_worker.py",
        "    if not math.isfinite(result):",
        "    if math.isinf(result):",
        "tests/agents/test_function_pool.py::test_mistake_of_score_is_told",
    ),
    Mutation(
        "trl_atropos/environment_kinds.py",
        "            if name.startswith(OWN_VARIABLES):",
        "            if name == OWN_VARIABLES:",
        "tests/agents/test_entries.py::test_mistake_in_entry_is_told",
    ),
    Mutation(
        "trl_atropos/services/guard.py",
        "    close_to_others()  # its variables",
        "    pass  # its variables",
        "tests/agents/test_users.py::test_guard_is_closed_to_its_own_user",
    ),
    Mutation(
        "trl_atropos/commands/train.py",
        "    if _names_agents(stated):",
        "    if not _names_agents(stated):",
        "tests/commands/test_train.py::test_launcher_of_agents_closes_itself",
    ),
    Mutation(
        "trl_atropos/protocol.py",
        'token = os.environ.pop(TOKEN_VARIABLE, "")',
        'token = os.environ.get(TOKEN_VARIABLE, "")',
        "tests/server/test_launch.py::test_hidden_token_is_known_to_its_process_alone",
    ),
    Mutation(
        "trl_atropos/server/sessions.py",
        "        await self.plane.close()\n",
        "",
        "tests/server/test_plane.py::test_server_closes_itself_before_a_session_is_open",
    ),
    Mutation(
        "trl_atropos/server/control.py",
        'await self._workers("close")',
        "await asyncio.sleep(0)",
        "tests/end_to_end/test_agents.py::test_agent_of_same_user_reads_only_what_the_page_lists",
    ),
    Mutation(
        "trl_atropos/tensors/shared_memory.py",
        "if hmac.compare_digest(key.encode(), given):",
        "if given:",
        "tests/tensors/test_tensors.py::test_memory_is_not_opened_without_key_and_owner",
    ),
    Mutation(
        "trl_atropos/tensors/shared_memory.py",
        "if user not in (0, os.geteuid()):",
        "if user < 0:",
        "tests/tensors/test_tensors.py::test_memory_is_not_opened_by_another_user",
    ),
    Mutation(
        "trl_atropos/train.py",
        "    return accelerator.num_processes > 1 or",
        "    return accelerator.num_processes > 2 or",
        "tests/commands/test_train.py::test_trainer_whose_gpu_memory_others_open_is_known",
    ),
    # -------------------------------------------------------------------------------------- batches
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "self._per_token = max(self._per_token, per_token)",
        "self._per_token = min(self._per_token, per_token)",
        "tests/batches/test_batching.py::test_largest_need_and_poorest_rank_set_budget",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "int(of_ranks.min())",
        "int(of_ranks.max())",
        "tests/batches/test_batching.py::test_largest_need_and_poorest_rank_set_budget",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "        torch.cuda.reset_peak_memory_stats(self._device)\n",
        "",
        "tests/batches/test_batching.py::test_largest_need_and_poorest_rank_set_budget",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "MICRO_BATCH_OVERHEAD = 1 / 16",
        "MICRO_BATCH_OVERHEAD = 1 / 160",
        "tests/batches/test_batching.py::test_further_micro_batch_must_save_its_cost",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "hands = _deal_groups(block, num_tokens, loads, sharing)",
        "hands = _deal(block, num_tokens, loads)",
        "tests/batches/test_batching.py::test_groups_stay_together_if_they_share",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "longest = np.max([",
        "longest = np.min([",
        "tests/batches/test_batching.py::test_plan_has_each_row_once_and_equal_ranks",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "    width = _rounded_up(width, multiple)\n",
        "",
        "tests/batches/test_batching.py::test_unpadded_forward_returns_scores_to_tokens",
    ),
    Mutation(
        "trl_atropos/batches/micro_batches.py",
        "values.gather(1, target).masked_fill(~scored, 0.0)",
        "values.gather(1, target)",
        "tests/batches/test_batching.py::test_fully_masked_completion_is_not_scored",
    ),
    Mutation(
        "trl_atropos/batches/inputs.py",
        "trained = rollout.token_advantages[rollout.mask]",
        "trained = rollout.token_advantages",
        "tests/trainer/test_advantages.py::test_logged_advantage_is_mean_of_trained_tokens",
    ),
    Mutation(
        "trl_atropos/batches/inputs.py",
        "log_ratio = log_ratio.sum(-1, keepdim=True)",
        "log_ratio = log_ratio.mean(-1, keepdim=True)",
        "tests/metrics/test_health.py::test_masked_sequence_counts_with_all_its_tokens",
    ),
    Mutation(
        "trl_atropos/batches/inputs.py",
        "is_outside = (ratio < low) | (ratio > high)",
        "is_outside = ratio > high",
        "tests/metrics/test_health.py::test_ratios_are_told_before_correction",
    ),
    Mutation(
        "trl_atropos/batches/inputs.py",
        'has_teacher = (inputs["distill_ids"] >= 0).any(-1)',
        'has_teacher = (inputs["distill_ids"] >= 0).all(-1)',
        "tests/trainer/test_distillation.py::test_term_and_gradient_equal_formula",
    ),
    Mutation(
        "trl_atropos/batches/generation_batch.py",
        "[rows, : logprobs.size(1)] = logprobs",
        "[: len(rows), : logprobs.size(1)] = logprobs",
        "tests/batches/test_generation_batch.py::test_training_pass_leaves_logprobs_and_ratio",
    ),
    Mutation(
        "trl_atropos/batches/schedule.py",
        "taken = steps % self.steps_per_batch or self.steps_per_batch",
        "taken = steps % self.steps_per_batch",
        "tests/batches/test_generation_batch.py::test_schedule_counts_used_and_unfinished_rollouts",
    ),
    Mutation(
        "trl_atropos/batches/sharing.py",
        "return max(0, common - 1)",
        "return common",
        "tests/batches/test_packing.py::test_shared_prompt_stands_once_in_row",
    ),
    Mutation(
        "trl_atropos/batches/packing.py",
        "filling_position % padded_size",
        "filling_position",
        "tests/batches/test_packing.py::test_row_holds_tokens_once_and_returns_scores",
    ),
    Mutation(
        "trl_atropos/batches/sequence_parallel.py",
        "return own_gradient * ctx.group.size, None",
        "return own_gradient, None",
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/batches/sequence_parallel.py",
        "shift_labels=self.own(next_labels)",
        "shift_labels=self.own(labels)",
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/batches/packed_attention.py",
        'inputs["position_ids"] = self.sequence_group.own(positions)',
        'inputs["position_ids"] = self.sequence_group.own(positions) * 0',
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/batches/packed_attention.py",
        "module = RankHeads(query.size(1) // key.size(1))",
        "pass",
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/batches/generation_batch.py",
        'order = group.of_first(drawn["row_index"])',
        'order = drawn["row_index"]',
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/training/computation.py",
        "by_rank[::sp_size].flatten(0, 1)",
        "by_rank.flatten(0, 1)",
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/trainer.py",
        'output["num_items_in_batch"] *= self.args.sp_size',
        "pass",
        DIVIDED,
    ),
    Mutation(
        "trl_atropos/batches/sharing.py",
        "WORTH_SHARING = 1 / 8",
        "WORTH_SHARING = 1 / 80",
        "tests/batches/test_packing.py::test_prompts_stay_unshared_without_gain",
    ),
    Mutation(
        "trl_atropos/batches/sharing.py",
        "            is_left[places] = False\n",
        "",
        "tests/batches/test_trees.py::test_token_of_tree_is_scored_once",
    ),
    Mutation(
        "trl_atropos/batches/sharing.py",
        "KEYS_PER_TOKEN = 40",
        "KEYS_PER_TOKEN = 4000",
        "tests/batches/test_trees.py::test_example_of_sharing_is_true",
    ),
    Mutation(
        "trl_atropos/rollouts/rollout.py",
        "return is_sampled[last] & ~self.tree.continued",
        "return is_sampled[last]",
        "tests/batches/test_trees.py::test_cut_calls_of_episode_are_found",
    ),
    Mutation(
        "trl_atropos/rollouts/tree.py",
        "while parent != NO_PARENT and number <= shared[parent]:",
        "while parent != NO_PARENT and number < shared[parent]:",
        "tests/batches/test_trees.py::test_example_of_tree_is_true",
    ),
    Mutation(
        "trl_atropos/batches/packed_attention.py",
        "distance < reach",
        "distance <= reach",
        "tests/batches/test_packing.py::test_kernel_gets_keys_of_each_rollout",
    ),
    Mutation(
        "trl_atropos/batches/numerics.py",
        "counts = (self.lengths + PAGE - 1) // PAGE",
        "counts = self.lengths // PAGE",
        "tests/batches/test_numerics.py::test_forward_pass_and_gradients_match_model",
    ),
    Mutation(
        "trl_atropos/batches/numerics.py",
        "of_bias = gradient.sum(0)",
        "of_bias = gradient.mean(0)",
        "tests/batches/test_numerics.py::test_forward_pass_and_gradients_match_model",
    ),
    # -------------------------------------------------------------------------------------- weights
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "if self._prepared is None or self._addresses != addresses:",
        "if self._prepared is None:",
        "tests/weights/test_fingerprints.py::test_trainer_fingerprints_follow_moved_weights",
    ),
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "if self._scratch.numel() < largest:",
        "if not self._scratch.numel():",
        "tests/weights/test_fingerprints.py::test_trainer_fingerprints_follow_moved_weights",
    ),
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "self._compared[subject.of] < subject.times:",
        "self._compared[subject.of] <= subject.times:",
        "tests/weights/test_fingerprints.py::test_fixed_memory_is_compared_once_per_training",
    ),
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "        self._compared.clear()\n",
        "",
        "tests/weights/test_fingerprints.py::test_fixed_memory_is_compared_once_per_training",
    ),
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "all(refused == {} for refused in traced)",
        "any(refused == {} for refused in traced)",
        "tests/weights/test_fingerprints.py::test_incomparable_weights_leave_proof_incomplete",
    ),
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "if reply.policy_version != self.policy_version:",
        "if reply.policy_version < self.policy_version:",
        "tests/weights/test_fingerprints.py::test_server_of_other_version_is_named",
    ),
    Mutation(
        "trl_atropos/weights/fingerprints.py",
        "if anew or subject.moves or (client.url, subject.of) not in self._refused:",
        "if anew or (client.url, subject.of) not in self._refused:",
        "tests/weights/test_fingerprints.py::test_moved_weights_are_traced_after_each_publish",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "        _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # where some "
        "keep state\n",
        "",
        "tests/weights/test_masters.py::test_optimizer_group_state_survives_checkpoint",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "        _copy_hyperparameters(self.param_groups, self.inner.param_groups)\n        return",
        "        return",
        "tests/weights/test_masters.py::test_optimizer_group_state_survives_checkpoint",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "torch.set_num_threads(max(usual, min(most, cores)))",
        "torch.set_num_threads(max(usual, most, cores))",
        "tests/weights/test_masters.py::test_offloaded_masters_step_on_own_cores",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "                sums[parameter] += gradient\n",
        "                sums[parameter] = gradient\n",
        "tests/weights/test_masters.py::test_gradients_set_aside_come_back_as_the_same_sums",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "with accelerator.no_sync(model), optimizer.gradients_aside():",
        "with accelerator.no_sync(model):",
        "tests/batches/test_attention_kernels.py::test_each_kind_of_row_is_compiled_in_one_piece",
    ),
    Mutation(
        "trl_atropos/trainer.py",
        "with self.stopwatch.part(COMPUTE), self.computation.gpu_share.computing():",
        "with self.stopwatch.part(COMPUTE):",
        "tests/trainer/test_gpu_share.py::test_all_passes_are_computed_on_the_share",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "if not parts or size > room:",
        "if not parts or size >= room:",
        "tests/weights/test_masters.py::test_offloaded_masters_are_stepped_in_parts",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "return min(2, len(parts)) * largest",
        "return len(parts) * largest",
        "tests/weights/test_masters.py::test_offloaded_masters_are_stepped_in_parts",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        'steps_in_backward(trainer) or hasattr(cls, "eval"):',
        "steps_in_backward(trainer):",
        "tests/weights/test_masters.py::test_optimizers_unfit_for_masters_are_refused",
    ),
    Mutation(
        "trl_atropos/weights/masters.py",
        "if is_written and not torch.equal(",
        "if is_written or not torch.equal(",
        "tests/weights/test_masters.py::test_foreign_write_to_parameters_is_kept",
    ),
    # ------------------------------------------------------------------------------------- services
    Mutation(
        "trl_atropos/services/evaluation_results.py",
        "shares[problem] - first_share",
        "first_share - shares[problem]",
        "tests/services/test_evaluation.py::test_gain_is_paired_by_problem",
    ),
    Mutation(
        "trl_atropos/services/evaluation_results.py",
        "range(1, fewest.bit_length())",
        "range(1, fewest.bit_length() - 1)",
        "tests/services/test_evaluation.py::test_pass_at_k_is_told_for_powers_of_two",
    ),
    Mutation(
        "trl_atropos/activity.py",
        "self.next = seconds + min(seconds, LONGEST_PAUSE)",
        "self.next = seconds + LONGEST_PAUSE",
        "tests/report/test_activity.py::test_messages_come_ever_more_rarely",
    ),
    Mutation(
        "trl_atropos/activity.py",
        " and _going_on[-1:] == [self]",
        "",
        "tests/report/test_activity.py::test_innermost_activity_speaks_alone",
    ),
    Mutation(
        "trl_atropos/metrics/timing.py",
        "        if not self._is_first:\n",
        "        if True:\n",
        "tests/report/test_activity.py::test_step_is_long_if_it_takes_twice_as_long_as_others",
    ),
    Mutation(
        "trl_atropos/report/model_card.py",
        'return "/" in name and _is_valid(name)',
        "return _is_valid(name)",
        "tests/report/test_model_card.py::test_name_that_the_hub_does_not_have_is_no_base",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "not_solved = min(0.0, spec.passes_above)",
        "not_solved = 0.0",
        "tests/services/test_evaluation.py::test_first_problems_are_asked_failures_are_unsolved",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "if step == 0 or int(made_at[1]) > step:",
        "if int(made_at[1]) > step:",
        "tests/services/test_evaluation.py::test_fresh_run_makes_its_own_first_evaluation",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "            shutil.rmtree(folder, ignore_errors=True)\n            "
        "folder.mkdir(parents=True)\n",
        "            folder.mkdir(parents=True)\n",
        "tests/services/test_evaluation.py::test_fresh_run_makes_its_own_first_evaluation",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "if self._needed or is_first:",
        "if is_first:",
        "tests/services/test_evaluation.py::test_overdue_evaluation_is_error_only_if_needed",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "        self._services.end(process.service)\n        del",
        "        del",
        "tests/services/test_evaluation.py::test_overdue_evaluation_is_error_only_if_needed",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "oldest = min(reply.oldest for reply in replies)",
        "oldest = max(reply.oldest for reply in replies)",
        "tests/services/test_evaluation.py::test_evaluation_has_version_range_of_all_servers",
    ),
    Mutation(
        "trl_atropos/services/evaluations.py",
        "for reply in replies if reply.oldest is not None]",
        "for reply in replies]",
        "tests/services/test_evaluation.py::test_evaluation_has_version_range_of_all_servers",
    ),
    # --------------------------------------------------------------------------------------- server
    Mutation(
        "trl_atropos/server/sampled_logprobs.py",
        "return lists.logprobs[rows, 0]",
        "return lists.logprobs[rows[::-1], 0]",
        "tests/server/test_sampled_logprobs.py::test_engine_takes_values_in_order_of_outputs",
    ),
    Mutation(
        "trl_atropos/server/sampled_logprobs.py",
        "            step_values = list(islice(values, count))",
        "            if output.request_id not in processor.request_states:\n"
        "                continue\n"
        "            step_values = list(islice(values, count))",
        "tests/server/test_sampled_logprobs.py::test_aborted_request_keeps_its_place_in_vector",
    ),
    Mutation(
        "trl_atropos/server/sampled_logprobs.py",
        "values, self._start + start)",
        "values, start)",
        "tests/server/test_sampled_logprobs.py::test_slice_keeps_place_of_its_tokens",
    ),
    Mutation(
        "trl_atropos/server/sampled_logprobs.py",
        "tokens[max(0, index - CONTEXT) : index]",
        "tokens[max(start, index - CONTEXT) : index]",
        "tests/server/test_sampled_logprobs.py::test_stream_parts_have_their_own_tokens",
    ),
    Mutation(
        "trl_atropos/server/openai_logprobs.py",
        "is_whole = type(serving) is owner and not request.stream",
        "is_whole = type(serving) is owner",
        "tests/server/test_openai_logprobs.py::test_streams_and_other_routes_get_vllms_objects",
    ),
    Mutation(
        "trl_atropos/server/openai_logprobs.py",
        'f"{MARK}-{len(collected)}"',
        'f"{MARK}"',
        "tests/server/test_openai_logprobs.py::test_choices_keep_their_own_logprobs",
    ),
    Mutation(
        "trl_atropos/server/openai_logprobs.py",
        "offset += len(text)",
        "offset += 1",
        "tests/server/test_openai_logprobs.py::test_answer_is_vllms_own",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "return max(float(logprob), LOWEST_LOGPROB)",
        "return float(logprob)",
        "tests/server/test_sampling.py::test_logprob_is_of_sampled_not_likeliest_token",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "return [_finite(entry[token].logprob) for token, entry in pairs]",
        "return [_finite(max(one.logprob for one in entry.values())) for token, entry in pairs]",
        "tests/server/test_sampling.py::test_logprob_is_of_sampled_not_likeliest_token",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "top_k=max(0, settings.top_k)",
        "top_k=settings.top_k",
        "tests/server/test_sampling.py::test_disabled_top_k_is_noted_as_0",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        'if not name.startswith("_")\n} - REFUSED_FIELDS',
        'if not name.startswith("_")\n}',
        "tests/server/test_sampling.py::test_forbidden_field_is_refused_by_name",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "msgspec.Meta(ge=0, lt=2**31)",
        "msgspec.Meta(ge=0, le=2**31)",
        "tests/server/test_sampling.py::test_forbidden_field_is_refused_by_name",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "params.output_kind = RequestOutputKind.FINAL_ONLY",
        "params.output_kind = RequestOutputKind.CUMULATIVE",
        "tests/server/test_sampling.py::test_body_becomes_prompt_and_sampling_params",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "            self._versions_in_flight[version] -= 1\n",
        "",
        "tests/server/test_control.py::test_server_tells_oldest_version_in_flight",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "            self.hold_back(False, 1.0)\n",
        "",
        "tests/server/test_control.py::test_held_requests_wait_while_others_are_served",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "        await self.plane.until_open()\n",
        "",
        "tests/server/test_control.py::test_request_in_pause_waits_for_next_version",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "range(math.ceil(let_in * len(self.waiting)))",
        "range(int(let_in * len(self.waiting)))",
        "tests/server/test_plane.py::test_share_of_waiting_requests_enters_in_order",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "deque(turn for turn in self.waiting if not turn.done())",
        "deque(self.waiting)",
        "tests/server/test_plane.py::test_abandoned_request_has_no_part_in_share",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "        while self.paused:  # it may be",
        "        if self.paused:  # it may be",
        "tests/server/test_plane.py::test_request_waits_on_if_next_pause_comes_first",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "                status = 200  # an answer counts once\n",
        "",
        "tests/server/test_plane.py::test_refusals_count_once_and_not_at_shutdown",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "self._reasons.pop(kind, _Reason())",
        "self._reasons.get(kind, _Reason())",
        "tests/server/test_plane.py::test_latest_refusal_reasons_are_kept",
    ),
    Mutation(
        "trl_atropos/server/plane.py",
        "self._known[key] = (min(oldest, *span), max(newest, *span))",
        "self._known[key] = (min(oldest, *span), span[1])",
        "tests/server/test_plane.py::test_evaluation_has_oldest_and_newest_version",
    ),
    Mutation(
        "trl_atropos/server/token_tree.py",
        "(common if is_whole else whole, common, number)",
        "(0, common, number)",
        "tests/server/test_token_tree.py::test_whole_path_comes_before_longer_prefix_of_another",
    ),
    Mutation(
        "trl_atropos/server/token_tree.py",
        "spans.append((version, begin + first, begin + end))",
        "spans.append((version, first, end))",
        "tests/server/test_token_tree.py::test_tree_keeps_each_sampled_token_once_on_its_path",
    ),
    Mutation(
        "trl_atropos/server/token_tree.py",
        "continues = is_whole and self.segments[child].at == common",
        "continues = is_whole",
        "tests/server/test_token_tree.py::test_whole_path_comes_before_longer_prefix_of_another",
    ),
    Mutation(
        "trl_atropos/server/session_door.py",
        "for name, value in headers if name in KEPT_HEADERS",
        'for name, value in headers if name != b"content-length"',
        "tests/server/test_sessions.py::test_fields_and_headers_of_a_call_reach_no_other_client",
    ),
    Mutation(
        "trl_atropos/server/session_door.py",
        "asked = completions * length",
        "asked = length",
        "tests/server/test_sessions.py::test_bounds_refuse_a_call_before_it_samples",
    ),
    Mutation(
        "trl_atropos/server/session_door.py",
        "            session.reserved -= reserved\n",
        "",
        "tests/server/test_sessions.py::test_bounds_refuse_a_call_before_it_samples",
    ),
    Mutation(
        "trl_atropos/server/session_capture.py",
        "    params = copy.copy(params)\n",
        "",
        "tests/server/test_session_capture.py::test_logprobs_are_asked_for_unless_they_come_anyway",
    ),
    Mutation(
        "trl_atropos/server/control.py",
        "        CALL.set(None)\n",
        "",
        "tests/server/test_sessions.py::test_pipelined_plain_request_is_not_kept",
    ),
    Mutation(
        "trl_atropos/server/sessions.py",
        '            _rewrite(scope, f"{match[1]}{HIDDEN}{match[3]}")\n',
        '            _rewrite(scope, scope["path"])\n',
        "tests/server/test_sessions.py::test_no_id_is_ever_logged",
    ),
    Mutation(
        "trl_atropos/server/sessions.py",
        "if self.plane.holding and query.evaluation is None:",
        "if query.evaluation is None and False:",
        "tests/server/test_sessions.py::test_hold_stops_new_sessions_and_no_calls_of_others",
    ),
    Mutation(
        "trl_atropos/server/session_reuse.py",
        "if is_empty or REPLACEMENT in text:",
        "if is_empty:",
        "tests/server/test_session_reuse.py::test_answer_with_another_text_stays_as_it_is",
    ),
    Mutation(
        "trl_atropos/server/token_tree.py",
        "if whole <= seen < len(prompt)",
        "if seen < len(prompt)",
        "tests/server/test_token_tree.py::test_prompt_leaves_the_completions_that_saw_its_beginning",
    ),
    Mutation(
        "trl_atropos/server/session_capture.py",
        "len(tokens) >= longest",
        "len(tokens) > longest",
        "tests/server/test_session_capture.py::test_other_prompts_stay_as_they_are",
    ),
    Mutation(
        "trl_atropos/metrics/monitor.py",
        "[sum(self._metrics[name], start=value)]",
        "[*self._metrics[name], value]",
        "tests/metrics/test_monitor.py::test_counts_are_added_up_within_a_logging_window",
    ),
    Mutation(
        "trl_atropos/server/compat.py",
        'mode="keep", clear_cache=clear_cache',
        'mode="keep", clear_cache=False',
        "tests/server/test_session_exactness.py::test_each_token_is_of_the_version_that_is_noted_for_it",
    ),
    # ------------------------------------------------------------------------------------- rollouts
    Mutation(
        "trl_atropos/rollouts/source.py",
        "self.max_staleness == 0 and not self.prefetch_batches",
        "self.max_staleness == 0",
        "tests/rollouts/test_atropos_source.py::test_requests_are_held_by_default_at_staleness_0",
    ),
    Mutation(
        "trl_atropos/rollouts/source.py",
        "float(restarts - self._reported_restarts)",
        "float(restarts)",
        "tests/rollouts/test_atropos_source.py::test_trainer_registers_again_after_api_restart",
    ),
    Mutation(
        "trl_atropos/rollouts/source.py",
        "num_steps=NO_STEP_LIMIT",
        "num_steps=run.max_steps",
        "tests/rollouts/test_atropos_source.py::test_environments_get_run_facts_but_no_last_step",
    ),
    Mutation(
        "trl_atropos/rollouts/source.py",
        "checkpoint_dir=os.path.abspath(run.output_dir)",
        "checkpoint_dir=run.output_dir",
        "tests/rollouts/test_atropos_source.py::test_environments_get_run_facts_but_no_last_step",
    ),
    Mutation(
        "trl_atropos/rollouts/source.py",
        'max(spool.end, state["cursor"])',
        "spool.end",
        "tests/rollouts/test_resume.py::test_rollouts_of_missing_folder_count_as_lost",
    ),
    Mutation(
        "trl_atropos/rollouts/selection.py",
        "rollout.staleness > self.max_staleness",
        "rollout.staleness >= self.max_staleness",
        "tests/rollouts/test_resume.py::test_stale_rows_are_dropped_unknown_ones_kept",
    ),
    Mutation(
        "trl_atropos/rollouts/source.py",
        "                accounting.trained -= run.unfinished_rows\n",
        "",
        "tests/rollouts/test_resume.py::test_unfinished_rows_at_checkpoint_are_dropped",
    ),
    Mutation(
        "trl_atropos/rollouts/selection.py",
        "ahead < self.slack",
        "ahead <= self.slack",
        "tests/rollouts/test_weights.py::test_environment_is_ahead_by_slack_at_most",
    ),
    Mutation(
        "trl_atropos/rollouts/selection.py",
        " if now - seen < FORGET]",
        "]",
        "tests/rollouts/test_weights.py::test_long_silent_environment_holds_nobody_back",
    ),
    Mutation(
        "trl_atropos/rollouts/versions.py",
        "not abs(sampled - trainer) <= TOLERANCE",
        "sampled - trainer > TOLERANCE",
        "tests/rollouts/test_intake.py::test_other_temperature_in_override_is_refused",
    ),
    Mutation(
        "trl_atropos/rollouts/row.py",
        "if row.logprobs is not None and not sft:",
        "if row.logprobs is not None:",
        "tests/rollouts/test_intake.py::test_supervised_rows_lack_logprobs_and_advantages",
    ),
    Mutation(
        "trl_atropos/rollouts/row.py",
        "ends[parent] = max(ends[parent], needed)",
        "ends[parent] = ends[parent] or needed",
        "tests/rollouts/test_trees.py::test_each_sent_token_is_trained_once_in_its_context",
    ),
    Mutation(
        "trl_atropos/rollouts/episodes.py",
        "            shared = int(earlier[-1]) + 1\n",
        "            shared = int(earlier[-1]) + 2\n",
        "tests/rollouts/test_episodes.py::test_calls_that_begin_alike_are_two",
    ),
    Mutation(
        "trl_atropos/rollouts/episodes.py",
        "shared = int(only_row_trains.argmax())",
        "pass",
        "tests/rollouts/test_episodes.py::test_rows_in_any_order_train_each_token_once",
    ),
    Mutation(
        "trl_atropos/rollouts/versions.py",
        "        is_turn[:num_shared] = False  # These are turns of the parts before it.\n",
        "",
        "tests/rollouts/test_trees.py::test_turn_has_path_as_prompt",
    ),
    Mutation(
        "trl_atropos/rollouts/selection.py",
        "        del self.dropped[JOINED]  # They are trained, in their episode's rollout.\n",
        "",
        "tests/rollouts/test_atropos_source.py::test_joined_rows_are_accounted_for_over_a_resume",
    ),
    Mutation(
        "trl_atropos/rollouts/spool.py",
        "header = replace(header, format=FORMAT_WITH_TREES)",
        "pass",
        "tests/rollouts/test_spool.py::test_file_with_branches_is_kept_from_earlier_versions",
    ),
    Mutation(
        "trl_atropos/rollouts/wire_values.py",
        "(values <= 0.0) & (values >= LOWEST_LOGPROB)",
        "values >= LOWEST_LOGPROB",
        "tests/rollouts/test_intake.py::test_impossible_logprob_is_unknown",
    ),
    Mutation(
        "trl_atropos/rollouts/reward_parts.py",
        "not abs(value) <= LARGEST",
        "abs(value) > LARGEST",
        "tests/rollouts/test_reward_parts.py::test_impossible_part_is_dropped_counted_and_explained",
    ),
    Mutation(
        "trl_atropos/rollouts/reward_parts.py",
        "float(count - self._reported[reason])",
        "float(count)",
        "tests/rollouts/test_reward_parts.py::test_impossible_part_is_dropped_counted_and_explained",
    ),
    Mutation(
        "trl_atropos/metrics/monitor.py",
        "            self.log(part_means(rollouts))\n",
        "",
        "tests/report/test_model_card.py::test_card_names_both_settings_of_a_resumed_run_and_no_licence",
    ),
    Mutation(
        "trl_atropos/environment_site/run.py",
        "            if any(value is not None for value in values):\n",
        "            if all(value is not None for value in values):\n",
        "tests/services/test_environment_source.py::test_rollouts_collected_one_by_one_keep_logprobs",
    ),
    Mutation(
        "trl_atropos/services/environment_metrics.py",
        "self._read_to += end",
        "self._read_to += len(content)",
        "tests/services/test_environment_metrics.py::test_line_counts_once_it_is_whole",
    ),
    Mutation(
        "trl_atropos/environment_site/environment_sampling.py",
        'if "sampled_logprobs" not in answer:',
        'if "sampled_logprobs" in answer:',
        "tests/server/test_generate.py::test_atroposlib_client_gets_tokens_and_logprobs",
    ),
    Mutation(
        "trl_atropos/environment_site/environment_sampling.py",
        'if self.content_type == "application/json":',
        "if True:",
        "tests/services/test_environment_runner.py::test_answer_that_is_not_called_json_is_not_read",
    ),
    Mutation(
        "trl_atropos/environment_site/environment_connections.py",
        "connector_owner=False",
        "connector_owner=True",
        "tests/services/test_environment_runner.py::test_requests_take_connections_that_are_idle",
    ),
    Mutation(
        "trl_atropos/environment_site/environment_connections.py",
        "keepalive_timeout=IDLE",
        "keepalive_timeout=60",
        "tests/services/test_environment_runner.py::test_connection_that_was_idle_for_long_is_not_taken",
    ),
    Mutation(
        "trl_atropos/rollouts/api.py",
        "        with suppress(ValueError):\n            return from_json(",
        "        with suppress(TypeError):\n            return from_json(",
        "tests/rollouts/test_api_requests.py::test_body_is_read_as_atropos_reads_it",
    ),
    Mutation(
        "trl_atropos/server/sampling.py",
        "if only_numbers and not params.stop:",
        "if only_numbers:",
        "tests/server/test_generate.py::test_answer_of_numbers_knows_stop_strings",
    ),
    # ------------------------------------------------------------------------------------- commands
    Mutation(
        "trl_atropos/commands/train.py",
        "sys.exit(128 + error.sigval)",
        "sys.exit(error.sigval)",
        "tests/commands/test_train.py::test_exit_code_tells_how_the_launcher_ended",
    ),
    Mutation(
        "trl_atropos/commands/train.py",
        "sys.exit(130 if interrupts else 1)",
        "sys.exit(1)",
        "tests/commands/test_train.py::test_exit_code_tells_how_the_launcher_ended",
    ),
    Mutation(
        "trl_atropos/commands/init.py",
        'f"runs/{Path(name).name}"',
        'f"runs/{name}"',
        "tests/commands/test_init.py::test_new_folder_holds_recipes_that_can_be_run",
    ),
    Mutation(
        "trl_atropos/terminal.py",
        "room = width - len(indent)",
        "room = width",
        "tests/commands/test_terminal.py::test_quoted_command_is_not_broken_if_it_fits_line",
    ),
    Mutation(
        "trl_atropos/terminal.py",
        "break_long_words=False,",
        "break_long_words=True,",
        "tests/commands/test_terminal.py::test_path_stays_whole_on_line_of_its_own",
    ),
    Mutation(
        "trl_atropos/server/launch.py",
        "if not _states_cache(stated):",
        "if _states_cache(stated):",
        "tests/server/test_launch.py::test_cpu_server_has_cache_of_stated_size",
    ),
    Mutation(
        "trl_atropos/commands/batch_script.py",
        'if longest and "--max-model-len" not in stated:',
        "if longest:",
        "tests/commands/test_slurm.py::test_server_gets_stated_flags_and_those_it_needs",
    ),
    Mutation(
        "trl_atropos/commands/batch_script.py",
        'settings.get("lora_r") or 16',
        'settings.get("lora_r") or 8',
        "tests/commands/test_slurm.py::test_server_gets_stated_flags_and_those_it_needs",
    ),
    Mutation(
        "trl_atropos/commands/batch_script.py",
        "    if each > gpus:\n",
        "    if each >= gpus:\n",
        "tests/commands/test_slurm.py::test_adapters_rank_and_one_node_are_rendered",
    ),
    Mutation(
        "trl_atropos/commands/slurm.sh",
        "(umask 077 &&",
        "(umask 022 &&",
        "tests/commands/test_slurm.py::test_trainers_and_servers_start_with_one_token",
    ),
    Mutation(
        "trl_atropos/commands/rehearsal.py",
        "for rollout in rollouts) - unknown\n",
        "for rollout in rollouts)\n",
        "tests/commands/test_try.py::test_dropped_and_unknown_rollouts_count_once",
    ),
    Mutation(
        "trl_atropos/commands/rehearsal.py",
        "dropped = size - len(rollouts)\n",
        "dropped = len(rollouts) - size\n",
        "tests/commands/test_try.py::test_dropped_and_unknown_rollouts_count_once",
    ),
    Mutation(
        "trl_atropos/commands/rehearsal.py",
        "        file.unlink(missing_ok=True)\n",
        "        pass\n",
        "tests/commands/test_try.py::test_earlier_try_leaves_no_answer",
    ),
    Mutation(
        "trl_atropos/commands/rehearsal.py",
        'return path.is_file() and path.read_bytes().endswith(b"\\n")',
        "return path.is_file()",
        "tests/commands/test_try.py::test_group_counts_when_it_is_written_whole",
    ),
    Mutation(
        "trl_atropos/commands/rehearsal.py",
        "if all(rollout.teaches_nothing(",
        "if any(rollout.teaches_nothing(",
        "tests/commands/test_try.py::test_group_without_variance_teaches_nothing",
    ),
]


def copy_repository(folder: Path) -> None:
    """Copies the files that git tracks, or would track, into an empty folder. Links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        source, target = ROOT / name, folder / name
        if not os.path.lexists(source):  # removed, and not committed yet
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def run_tests(folder: Path, tests: Sequence[str], timeout: float) -> str:
    """Runs tests of a copy of the repository until the first one fails. Returns the outcome."""
    log = folder / LOG
    log.unlink(missing_ok=True)
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = PYTEST.fork(
        words, os.environ | ENVIRONMENT | {"PYTHONPATH": str(folder)}, log, cwd=folder
    )
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
    return OUTCOMES.get(code, f"pytest ended with exit code {code}:\n{log.read_text()[-3000:]}\n")


def try_mutation(folder: Path, mutation: Mutation) -> str:
    """Makes a mistake in a copy of the repository, runs its test, and takes the mistake back.
    Returns the outcome."""
    path = folder / mutation.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(original), encoding="utf-8")
    try:
        return run_tests(folder, [mutation.test], TIMEOUT)
    finally:
        path.write_text(original, encoding="utf-8")


def main(numbers: Sequence[int]) -> int:
    """Tries the mutations of these numbers, or all. Returns how many were not caught."""
    chosen = numbers or range(len(MUTATIONS))
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_repository(folder)
        # A test that fails anyway would seem to catch everything.
        tests = sorted({MUTATIONS[number].test for number in chosen})
        outcome = run_tests(folder, tests, TIMEOUT * len(tests))
        if outcome != SURVIVED:
            print((folder / LOG).read_text()[-5000:])
            sys.exit("The tests must pass without any mutation first: see above.")
        for number in chosen:
            mutation = MUTATIONS[number]
            began = time.monotonic()
            outcome = try_mutation(folder, mutation)
            missed += outcome != CAUGHT
            line = next(line for line in mutation.old.splitlines() if line.strip()).strip()
            seconds = time.monotonic() - began
            print(f"{number:>3} {outcome} in {seconds:.0f} s: {mutation.file}: {line}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are caught.")
    return missed


if __name__ == "__main__":
    sys.exit(1 if main([int(word) for word in sys.argv[1:]]) else 0)
