"""`python -m multimodal` and `accelerate launch -m multimodal` are the console script."""

from multimodal.cli import main

main()
