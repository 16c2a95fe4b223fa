"""Workers as actors of Ray: the cluster, the session, a worker on another host."""
