"""Real launchers, their documented environments, and who trains alone under them."""
