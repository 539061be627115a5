"""Parts of `benchmarks.passes`."""
