"""Measure the pages and the site: what is missing, broken, not run, not shown."""
