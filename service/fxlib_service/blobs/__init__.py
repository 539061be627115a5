"""Where blobs are kept: one interface, and its implementations."""
