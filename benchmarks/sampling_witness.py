"""Keeps what vLLM's engine holds for each sampled token, in the engine's process, before anything
carries it anywhere: what `sampling_equality.py` compares with.

It reads the step's arrays by vLLM's own `slice_request`, as vLLM's own path does.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler

from trl_atropos.server.extension import WorkerExtension  # patches the scheduler


@dataclass
class Seen:
    """What one request sampled, token by token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


SEEN: defaultdict[str, Seen] = defaultdict(Seen)  # by vLLM's own id of the request
COUNTS: defaultdict[str, int] = defaultdict(int)
_update_from_output = Scheduler.update_from_output


def _witnessed_update(scheduler, scheduler_output, model_output, *args, **options):
    lists = model_output.logprobs
    outputs_by_client = _update_from_output(
        scheduler, scheduler_output, model_output, *args, **options
    )
    COUNTS["preemptions"] += len(scheduler_output.preempted_req_ids or ())
    if lists is None:
        return outputs_by_client
    COUNTS[f"steps with {lists.logprobs.shape[1]} values a token"] += 1
    for client_outputs in outputs_by_client.values():
        for output in client_outputs.outputs:
            count = len(output.new_token_ids)
            if not count:
                continue
            row = model_output.req_id_to_index[output.request_id]
            ids, values, ranks, *_ = lists.slice_request(row, count)
            seen = SEEN[output.request_id]
            seen.tokens += ids[:, 0].tolist()
            seen.logprobs += values[:, 0].tolist()
            seen.ranks += ranks.tolist()
            COUNTS["vectors"] += output.new_logprobs is not None and not len(
                output.new_logprobs.sampled_token_ranks
            )
    return outputs_by_client


Scheduler.update_from_output = _witnessed_update


class Witness(WorkerExtension):
    """The server's worker extension, with a question for what was seen."""

    def seen(self) -> dict:
        """Returns all requests and counts since the last call, and the runner's module."""
        requests = {}
        for name, seen in SEEN.items():
            requests[name] = [seen.tokens, seen.logprobs, seen.ranks]
        answer = {
            "requests": requests,
            "counts": dict(COUNTS),
            "runner": type(self.model_runner).__module__,
        }
        SEEN.clear()
        COUNTS.clear()
        return answer
