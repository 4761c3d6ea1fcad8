"""`tandem key`: changes files of callers' keys."""
