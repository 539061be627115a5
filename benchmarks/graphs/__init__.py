"""Programs of any size, for what is measured against the number of nodes."""
