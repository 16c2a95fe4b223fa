"""Processes of a group on other hosts, each reached by ssh or a command like it.

    remote_host       a host, and the command that reaches it
    machine_file      hosts of a machine's file
    hosts, member     processes on hosts, as the launcher's supervisor has them
    frames            what both ends write into ssh's pipe
    host_guard        the end on the host: starts the command, lets nothing outlive it
    bundle            the source of that end, which the launcher sends
    failures          why a host could not be used, from what ssh printed

A host needs Python, the script in the same folder and the library; nothing of this
package is started from its files there.
"""
