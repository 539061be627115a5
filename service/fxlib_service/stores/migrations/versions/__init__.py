"""The steps, one file each. Once released, a step is never changed."""
