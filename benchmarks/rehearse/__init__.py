"""Rehearse plans: right steps pass, and what XLA cuts wrongly does not."""
