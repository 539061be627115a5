"""The parts of the benchmark of row versions: what its servers do."""
