"""From scored groups on the wire to rollouts that a trainer can use."""
