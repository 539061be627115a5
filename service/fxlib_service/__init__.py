"""The optimization service: takes jobs over gRPC, keeps them, leases them to workers, and tells the answers.

It rewrites and measures nothing: that is what workers do, which it knows through the protocol alone.
"""
