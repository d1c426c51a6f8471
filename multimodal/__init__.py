"""Train, evaluate and use CLIP-style image-text models."""
