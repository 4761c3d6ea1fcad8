"""Counts requests against the limits of their callers' keys."""
