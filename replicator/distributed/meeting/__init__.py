"""Processes of a group meet before JAX starts, and prove that they belong to the run.

roster            who has come, and who cannot belong to the group
server, meet      process 0's side, and that of all others
run_secret        where the run's secret is, and what goes on without one
coordinator_tls   the certificates by which JAX's own service knows its processes
"""
