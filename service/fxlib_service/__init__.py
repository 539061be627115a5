"""The optimization service: takes jobs over gRPC, keeps them, leases them to workers, and tells the answers."""
