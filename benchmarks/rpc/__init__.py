"""Calls timed beside bare sockets, gRPC and Ray."""
