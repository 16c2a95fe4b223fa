"""Messages of any size in chunks over gRPC."""
