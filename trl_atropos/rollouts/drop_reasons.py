"""Reasons for which a rollout is never trained. Each has one name, by which it is counted.

The names stand in the spool's files, in checkpoints, and in the metrics `rollouts/dropped_REASON`.
"""

# `intake.Intake` drops a rollout when it arrives.
REJECTED = "rejected"  # Its group is malformed, or cannot be trained on.
TOO_LONG = "too_long"  # It is longer than `max_sequence_length`.
UNTRAINED = "untrained"  # Its mask leaves no token to train on.
EVALUATION = "evaluation"  # The environment marked its group as an evaluation.
INTAKE_REASONS = (REJECTED, TOO_LONG, UNTRAINED, EVALUATION)

# Not a loss: rows that an environment sent by themselves became part of the rollout that their
# episode is, which counts once. It is counted beside the reasons, because the API counts rows.
JOINED = "joined"

# `selection.Selection` drops a rollout before the trainer gets it.
STALE = "stale"  # It is older than `max_staleness` optimizer steps.
ZERO_VARIANCE = "zero_variance"  # All scores of its group are equal, so it teaches nothing.
OVER_SHARE = "over_share"  # Its environment is ahead of its share.

# The rollout is lost.
LOST_IN_DELIVERY = "lost_in_delivery"  # The API handed it out in vain, or its file is gone.
RESUMED_MID_BATCH = "resumed_mid_batch"  # A checkpoint in mid-batch came after it was handed out.

# Complete the sentence "since the last step these were dropped: 3 ...", for a run that waits. They
# are not only texts: `AtroposSource.metrics` reports each reason here from the first step on, as 0
# if nothing was dropped. Only INTAKE_REASONS and LOST_IN_DELIVERY are reported so without being
# here. Any other reason has a metric only once something was dropped for it.
DESCRIPTIONS = {
    STALE: "too old (`max_staleness`: raise it, or lower "
    "the environments' `max_batches_offpolicy`)",
    ZERO_VARIANCE: "of equal scores (`replace_zero_variance_groups`: give tasks of the right "
    "difficulty)",
    OVER_SHARE: "ahead of their environment's share (`enforce_environment_weights`: look at the "
    "logs of the others)",
    REJECTED: "of groups that cannot be trained on",
    TOO_LONG: "longer than `max_sequence_length`",
    UNTRAINED: "without a token to train on",
}
