"""Run the command as `python -m replicator`, where no script is installed."""

import sys

from replicator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
