"""The meeting of a group's processes before JAX starts, and the proof of its members.

roster            which processes have arrived, and which cannot belong to the group
server, meet      the side of process 0, and that of all others
run_secret        where the run's secret is, and whether to go on without one
coordinator_tls   the certificates that JAX's own service asks for
"""
