"""``python -m belady`` is the command ``belady``."""

import sys

from .entry import main

if __name__ == "__main__":  # the processes of a sweep import this file, too
    sys.exit(main())
