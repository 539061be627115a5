"""The cells of `benchmarks.overlap`: what is measured in each, and how."""
