"""`python -m pyllama.server`."""

import sys

from pyllama.server.main import main

if __name__ == "__main__":
    sys.exit(main())
