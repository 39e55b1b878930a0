"""What a batch says, what that means, and where the time goes."""
