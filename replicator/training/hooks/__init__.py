"""Do something every so many steps or seconds; the public face is `hooks`."""
