"""Where blobs are kept: the interface of a blob store, and the one that keeps files in a folder.

What arrives in pieces is put together in `servicers.blobs`; which blobs are still needed is decided in `retention`.
"""
