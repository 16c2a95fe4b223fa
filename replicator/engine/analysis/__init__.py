"""Proofs on a jaxpr: values that vary over replicas, noise, padding."""
