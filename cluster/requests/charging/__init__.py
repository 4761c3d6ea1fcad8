"""What requests count against the limits of their callers' keys."""
