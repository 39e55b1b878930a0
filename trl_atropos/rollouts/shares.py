"""Keeps what is trained in the proportion of the environments' weights, which the Atropos API does not do.

The API tells an environment its weight, and the environment limits by it how many requests it has at the inference
server at once. Where that is no limit, as with short rollouts or fast servers, two environments of weights 1 and 3
deliver alike. `min_batch_allocation` does not hold either: it is met by one group. So rows of an environment that is
ahead of its share are passed over. To waste fewer, have such environments sample less (`--env.max_num_workers`).
"""

import time
from collections import Counter

from trl_atropos.rollouts.atropos import ApiUnreachable, AtroposClient, ReplyLost
from trl_atropos.rollouts.schema import Row

OVER_SHARE = "over_share"  # why a row is dropped

REFRESH = 10.0  # seconds after which the weights are asked for again
FORGET = 120.0  # seconds without a row after which an environment no longer counts


class Shares:
    """
    Args:
        client: asks for the weights, in the thread that pulls.
        slack: rows by which an environment may be ahead, for those that deliver in bursts.
    """

    def __init__(self, client: AtroposClient, slack: int):
        self._client = client
        self._slack = slack
        self._last_seen: dict[int, float] = {}
        self._asked = 0.0
        self._weights: dict[int, float] = {}  # replaced as a whole: another thread reads it
        self._counted: tuple[int, ...] = ()  # environments that the counts are about
        self._taken: Counter[int] = Counter()
        self._group = (-1, True)  # the group of the latest row, and what was decided of it

    def note(self, env_ids: set[int]) -> None:
        """Rows of these environments came in: have their weights at hand. Called by the thread that pulls."""
        now = time.monotonic()
        self._last_seen |= dict.fromkeys(env_ids, now)
        active = [env_id for env_id, seen in self._last_seen.items() if now - seen < FORGET]
        if set(active) == set(self._weights) and now - self._asked < REFRESH:
            return
        try:
            states = {env_id: self._client.environment(env_id) for env_id in active}
        except (ApiUnreachable, ReplyLost):
            return  # the pull finds out what is wrong
        self._asked = now
        self._weights = {env_id: state.env_weight for env_id, state in states.items() if state is not None}

    def admits(self, row: Row) -> bool:
        """Whether a row may be trained now. Of one group, all rows may or none. Called for every row, in order."""
        weights = self._weights
        if row.env_id not in weights:
            return True
        if tuple(sorted(weights)) != self._counted:  # one came or went: what was before says nothing of the shares
            self._counted = tuple(sorted(weights))
            self._taken.clear()
        if row.group != self._group[0]:
            share = weights[row.env_id] / sum(weights.values())
            ahead = self._taken[row.env_id] - share * self._taken.total()
            self._group = (row.group, ahead < self._slack)
        if self._group[1]:
            self._taken[row.env_id] += 1
        return self._group[1]
