"""The parts of `AtroposGRPOTrainer` that override no method of TRL's."""
