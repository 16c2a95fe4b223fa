"""Write what one replica does; run it on many devices, with the same answer.

Inside a step: the collectives, `replica_id`, keys. Around it: `Replicator`. See README.
The public names are those of `__init__.pyi`; each is loaded when it is first used, so
that a script which reads flags, or prints its help, does not wait for all of them.
"""

import lazy_loader

from replicator.base.host.fake_devices import fake_devices as fake_devices
from replicator.base.host.fake_devices import obey_environment
from replicator.base.tracebacks import short_traceback
from replicator.base.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# The one effect of this import, and only where the environment asks for it: set later,
# it would come after a script's first array, and fail.
with short_traceback:
    obey_environment()
