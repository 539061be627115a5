"""Stubs generated from `protos/fxlib/v1` by `make protos`."""
