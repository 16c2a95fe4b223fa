"""Numbers of this library on the accelerators of a host."""
