"""The compiled step beside the one written by hand."""
