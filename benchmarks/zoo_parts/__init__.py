"""What the benchmark of zoos is made of: the factories that its manifest names."""
