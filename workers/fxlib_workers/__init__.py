"""Workers claim jobs of the service, rewrite graphs in a sandboxed process, and measure them on Ray."""
