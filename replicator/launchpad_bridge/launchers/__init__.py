"""Start the workers of a program: threads, processes, Ray, or in a fixed order."""
