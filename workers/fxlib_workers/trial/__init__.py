"""The trial: the user's step, original and rewritten, in processes of its own on Ray."""
