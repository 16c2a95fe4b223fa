"""This process and its machine: clock, files, devices, text."""
