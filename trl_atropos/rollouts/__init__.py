"""Rollouts in: from scored groups on the wire to rows a trainer can use."""
