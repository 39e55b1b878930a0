"""What the monitor of generation batches makes of measures within one logging window."""

from collections import defaultdict

from accelerate import Accelerator

from trl_atropos import AtroposGRPOConfig
from trl_atropos.metrics.monitor import BatchMonitor
from trl_atropos.rollouts.reward_parts import Count


def test_counts_are_added_up_within_a_logging_window(tmp_path):
    """TRL logs the mean of a metric's values: that of one value is the sum."""
    metrics = defaultdict(list)
    args = AtroposGRPOConfig(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none"
    )
    monitor = BatchMonitor(args, Accelerator(cpu=True), metrics)
    for version, tokens in enumerate((10.0, 30.0, 5.0)):
        monitor.log_policy(
            version, {"sessions/tokens": Count(tokens), "rollouts/waiting_rows": tokens}
        )
    assert metrics["sessions/tokens"] == [45.0]
    assert metrics["rollouts/waiting_rows"] == [10.0, 30.0, 5.0]
    assert metrics["policy/version"] == [2.0]
