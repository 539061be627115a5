"""The gRPC services: thin, each method converts and calls. They raise `ServiceError`; interceptors do the rest."""
