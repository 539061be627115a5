"""The optimization service: takes jobs over gRPC, keeps them and their blobs, leases them to workers, tells the answers."""
