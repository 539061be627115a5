"""Stubs generated from `protos/fxlib/v1` by `make protos`.

Nothing here is written by hand; messages are converted in `fxlib.protocol`, and graphs in `fxlib.wire`.
"""
