"""A running program as a local web page: its graph drawn, its traffic on the arrows."""
