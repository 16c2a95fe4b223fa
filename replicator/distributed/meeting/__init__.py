"""The meeting of a group's processes before JAX starts, and the proof of its members.

members           processes that have arrived, and the errors that refuse others
server, client    the side of process 0, and that of all other processes
run_secret        the run's secret, and the decision to go on without one
coordinator_tls   certificates for JAX's own service
"""
