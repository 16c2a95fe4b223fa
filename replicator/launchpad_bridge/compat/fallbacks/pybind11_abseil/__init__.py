"""Where Launchpad's errors came from; only the type that programs catch is here."""
