"""`tandem bench`: the benchmarks of a checkout, and the load of a server as its clients see it."""
