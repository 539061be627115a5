"""Parts of `benchmarks.inference`."""
