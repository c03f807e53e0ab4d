import sys

from urrl.cli import main

sys.exit(main())
