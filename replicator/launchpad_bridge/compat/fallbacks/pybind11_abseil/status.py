"""`StatusNotOk`, which programs of Launchpad catch: any error of a call here."""

from replicator.errors import RpcError as StatusNotOk

__all__ = ["StatusNotOk"]
