"""Where jobs are kept: one interface, and its implementations."""
