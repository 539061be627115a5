"""Where blobs are kept: the interface of a blob store, one that keeps files in a folder, and one for object stores.

What arrives in pieces is put together in `servicers.blobs`; which blobs are still needed is decided in `retention`.
"""
