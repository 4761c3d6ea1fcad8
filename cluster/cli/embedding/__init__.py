"""`tandem embed`."""
