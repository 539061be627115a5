"""Stores of blobs: the interface, an implementation with files in a folder, and one for object stores.

`servicers.blobs` assembles uploads from their pieces, and `retention` decides which blobs are still needed.
"""
