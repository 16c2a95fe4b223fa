"""What `replicator doctor` looks at: each check is a function of what was measured."""
