"""`multimodal train` as a script, for launchers that want one.

accelerate launch scripts/train.py configs/recipes/quickstart.yaml optim.lr=1e-3
"""

import sys

from multimodal.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
