"""The output folder: the plan, the shards, their indexes and the run record, on disk or mirrored at a URL."""
