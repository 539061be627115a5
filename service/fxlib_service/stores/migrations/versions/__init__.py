"""The steps, one file each; once released, a step is never changed.

The tables as they are after all steps are in `schema`, and `migrations` decides which steps a database needs.
"""
