"""The parts of `AtroposGRPOTrainer`: its base classes, and what overrides no method of TRL's."""
